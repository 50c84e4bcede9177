"""The rounds of graph mode: a step is compiled as it is and measured; its graphs are planned, compiled with the plan's
replays, and measured; and what they save is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from poochplan.errors import InfeasibleError, StepError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, Profile
from poochplan.planner.planning import plan as planned
from poochplan.profiler.profiling import profile as profiled
from poochplan.runtime.regions.graph_backend import compile_in_place
from poochplan.sessions import apply
from poochplan.tensors.torch_private import forget_compiled
from poochplan.units import format_bytes, parse_budget

from .choosing import as_measured, beside_in_core, graph_budget, recomputed_nodes
from .options import given_to_backend, given_to_torch
from .reference import Bits, bits_of_a_step, first_unequal

ROUNDS = 3
"""Times that graphs are planned and compiled at most."""
SHARES = "5e10,1e10"
"""Flops and bytes a second, for the shares that ops have of a measured step: those of a core of a server's CPU."""


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
            self.model.compile(**self.options, dynamic=False)
        else:
            compile_in_place(self.model, replays, given_to_backend(self.options), **given_to_torch(self.options))

    def bits(self) -> Bits:
        return bits_of_a_step(self.step, self.model, self.optimizer)

    def measured(self) -> Profile:
        how = self.measuring
        found = profiled(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            link=how.link,
            spill_dir=how.spill_dir,
            throttle=how.throttle if how.link is None else None,
            iterations=how.iterations,
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
    measured = taken.measured()
    budget_bytes = parse_budget(budget, measured.in_core_peak_bytes)
    say("capturing its graphs without memory")
    graphs = as_measured(taken.graphs(), measured)
    found = _rounds(taken, graphs, graph_budget(budget_bytes, graphs, measured), budget_bytes, time_limit_s)
    found = beside_in_core(found, measured)
    say("comparing one step with that of the model compiled as it is")
    with apply(found, taken.model, spill_dir=taken.measuring.spill_dir, meter="never"):
        unequal = first_unequal(stock, taken.bits())
    if unequal:
        raise StepError(
            f"expected the bits of the same model compiled without a plan, found {unequal} to differ under one; "
            "kernels that are fused otherwise gave other bits: compile its blocks (block.compile()), or plan it "
            "without torch.compile"
        )
    return found


def _rounds(taken: Taking, graphs: Profile, goal_bytes: int, budget_bytes: int, time_limit_s: float) -> Plan:
    """Plans the graphs, compiles and measures what comes of it, and plans that; again with a lower goal where it does
    not fit, since what the compiler makes of a graph with replays is only known then.
    """
    tried: dict[tuple[str, ...], InfeasibleError] = {}
    for _ in range(ROUNDS):
        taken.say("planning the graphs")
        replays = _replays(graphs, goal_bytes, time_limit_s)
        if replays in tried:
            break
        taken.say(f"compiling with {len(replays)} values recomputed in the graphs")
        taken.compile(replays)
        measured = taken.measured()
        taken.say("planning what it saves")
        try:
            return _with_replays(planned(measured, budget_bytes, time_limit_s=time_limit_s), replays, graphs)
        except InfeasibleError as error:
            tried[replays] = error
            goal_bytes -= error.smallest_budget_bytes - budget_bytes
    raise min(tried.values(), key=lambda error: error.smallest_budget_bytes)


def _replays(graphs: Profile, goal_bytes: int, time_limit_s: float) -> tuple[str, ...]:
    """What the plan for that goal recomputes; of the smallest one that there is a plan for where that is larger."""
    try:
        return recomputed_nodes(graphs, planned(graphs, max(goal_bytes, 1), time_limit_s=time_limit_s, arena="off"))
    except InfeasibleError as error:
        smallest = error.smallest_budget_bytes
        return recomputed_nodes(graphs, planned(graphs, smallest, time_limit_s=time_limit_s, arena="off"))


def _with_replays(plan: Plan, replays: tuple[str, ...], graphs: Profile) -> Plan:
    if not replays:
        return plan
    wanted = set(replays)
    size_bytes = sum(value.size_bytes for value in graphs.values if wanted.intersection(value.nodes))
    note = f"{len(replays)} values ({format_bytes(size_bytes)}) are recomputed inside compiled graphs"
    return msgspec.structs.replace(plan, replays=replays, notes=(*plan.notes, note))
