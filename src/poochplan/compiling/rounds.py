"""The rounds of graph mode: a step is compiled as it is and measured; its graphs are planned, compiled with the plan's
replays, and measured; and what they save is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poochplan.errors import InfeasibleError, StepError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, Profile
from poochplan.planner.planning import plan as planned
from poochplan.profiler.profiling import profile as profiled
from poochplan.runtime.graphs.graph_backend import compile_in_place
from poochplan.sessions import apply
from poochplan.torch_private.compiler_internals import compile_module, forget_compiled
from poochplan.units import format_bytes, parse_budget, share_of_peak

from .choosing import as_measured, beside_in_core, graph_budget, recomputed_nodes, with_replays, without_replays
from .options import given_to_backend, given_to_torch
from .reference import Bits, bits_of_a_step, first_unequal

ROUNDS = 3
"""Times that graphs are planned and compiled at most."""
DEARER = 0.05
"""How much more of a step a plan may cost than its graphs promise, before less is tried to be swapped."""
_BRIEFLY, _TIMED = 2, 3
"""Iterations in which steps are measured where the user has not said how many: of the step that is compiled as it is,
which is not planned, and of the one with points."""
_SHARE_OF_LIMIT = 1 / 3
"""Of the time for a plan, what one for the graphs has: its seconds are shares, and are measured behind it."""
SHARES = "cpu-core"
"""The roofline by which ops have their shares of a measured step."""


class Measuring(NamedTuple):
    """How steps are profiled; see ``poochplan.profile``."""

    link: Link | None
    spill_dir: str | Path | None
    throttle: str | float | None
    iterations: int | None


class Taking:
    """Profiles of one step, of code with and without replays. State: the link, once it was measured."""

    def __init__(
        self,
        step: Callable[[], Any],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
        measuring: Measuring,
        say: Callable[[str], None],
    ) -> None:
        self.step, self.model, self.optimizer, self.options = step, model, optimizer, options
        self.measuring, self.say = measuring, say

    def compile(self, replays: tuple[str, ...] | None) -> None:
        """In place: as it is where ``replays`` is None, else with points and these replays in the code."""
        if replays is None:
            forget_compiled()
            compile_module(self.model, **self.options, dynamic=False)
        else:
            compile_in_place(self.model, replays, given_to_backend(self.options), **given_to_torch(self.options))

    def bits(self) -> Bits:
        return bits_of_a_step(self.step, self.model, self.optimizer)

    def measured(self, iterations: int) -> Profile:
        """``iterations``: where the user has not said how many."""
        how = self.measuring
        found = profiled(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            link=how.link,
            spill_dir=how.spill_dir,
            throttle=how.throttle if how.link is None else None,
            iterations=iterations if how.iterations is None else how.iterations,
            progress=self.say,
        )
        self.measuring = how._replace(link=found.link)
        return found

    def graphs(self) -> Profile:
        """Of the step's graphs, without memory."""
        return profiled(self.step, model=self.model, optimizer=self.optimizer, mode="fake", roofline=SHARES)


def planned_within(taken: Taking, budget: str | int | float, time_limit_s: float) -> Plan:
    """The plan for that budget, with which the model is compiled then; raises what ``compile`` raises."""
    say = taken.say
    say("compiling the step as it is")
    taken.compile(None)
    stock = taken.bits()
    measured = taken.measured(_BRIEFLY)
    budget_bytes = parse_budget(budget, measured.in_core_peak_bytes)
    say("capturing its graphs without memory")
    graphs = as_measured(taken.graphs(), measured)
    found = _rounds(taken, graphs, measured, budget_bytes, time_limit_s)
    unequal = _unequal(taken, found, stock)
    if unequal and found.replays:
        say(f"{unequal} differs: nothing is recomputed in the graphs")
        found = _rounds(taken, without_replays(graphs), measured, budget_bytes, time_limit_s)
        unequal = _unequal(taken, found, stock)
    if unequal:
        raise StepError(
            f"expected the bits of the same model compiled without a plan, found {unequal} to differ under one; "
            "kernels that are fused otherwise gave other bits: compile its blocks (block.compile()), or plan it "
            "without torch.compile"
        )
    return found


def _unequal(taken: Taking, plan: Plan, stock: Bits) -> str:
    """What differs in one planned step from one of the model compiled as it is; empty where nothing does."""
    taken.say("comparing one step with that of the model compiled as it is")
    with apply(plan, taken.model, spill_dir=taken.measuring.spill_dir, meter="never"):
        return first_unequal(stock, taken.bits())


def _rounds(taken: Taking, graphs: Profile, in_core: Profile, budget_bytes: int, time_limit_s: float) -> Plan:
    """Plans the graphs, compiles and measures what comes of it, and plans that; again with a lower goal where it does
    not fit, or costs far more than its graphs promise, since what the compiler makes of a graph with replays is only
    known then. The plan that costs least is the one that the model is compiled with in the end.
    """
    found: dict[tuple[str, ...], Plan] = {}
    smallest: dict[tuple[str, ...], int] = {}
    compiled: tuple[str, ...] = ()
    goal_bytes = graph_budget(budget_bytes, graphs, in_core)
    for _ in range(ROUNDS):
        taken.say("planning the graphs")
        within_goal = _planned_graphs(graphs, goal_bytes, time_limit_s * _SHARE_OF_LIMIT)
        goal_bytes = min(goal_bytes, within_goal.prediction.peak_bytes)  # below it, something is planned otherwise
        replays = recomputed_nodes(graphs, within_goal)
        if replays in found or replays in smallest:
            break
        taken.say(f"compiling with {len(replays)} values recomputed in the graphs")
        taken.compile(replays)
        compiled = replays
        measured = taken.measured(_TIMED)
        taken.say("planning what it saves")
        try:
            plan = planned(measured, budget_bytes, time_limit_s=time_limit_s)
        except InfeasibleError as error:
            smallest[replays] = error.smallest_budget_bytes
            goal_bytes -= error.smallest_budget_bytes - budget_bytes
            continue
        found[replays] = beside_in_core(with_replays(plan, replays, graphs), in_core, within_goal.prediction)
        if found[replays].prediction.overhead <= within_goal.prediction.overhead + DEARER:
            break
        goal_bytes -= max(measured.in_core_peak_bytes - budget_bytes, 0)
    if not found:
        raise _infeasible(min(smallest.values()), budget_bytes, in_core)
    best = min(found, key=lambda one: found[one].prediction.overhead)
    if best != compiled:
        taken.say(f"compiling with {len(best)} values recomputed in the graphs, which cost least")
        taken.compile(best)
    return found[best]


def _infeasible(smallest_bytes: int, budget_bytes: int, in_core: Profile) -> InfeasibleError:
    share = share_of_peak(smallest_bytes, in_core.in_core_peak_bytes)
    return InfeasibleError(
        f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}) inside the compiled model: "
        f"expected at least {smallest_bytes} bytes ({format_bytes(smallest_bytes)}, {share:.2%} of its in-core peak); "
        "pass that, or make the batch smaller",
        smallest_budget_bytes=smallest_bytes,
    )


def _planned_graphs(graphs: Profile, goal_bytes: int, time_limit_s: float) -> Plan:
    """The plan for that goal; for the smallest one that there is a plan for where that is larger."""
    try:
        return planned(graphs, max(goal_bytes, 1), time_limit_s=time_limit_s, arena="off")
    except InfeasibleError as error:
        return planned(graphs, error.smallest_budget_bytes, time_limit_s=time_limit_s, arena="off")
