"""The rounds of graph mode. A step is compiled without a plan and measured. Its graphs are planned, compiled with the
plan's replays, and measured. The tensors that they then save are planned. ``docs/graph-mode.md`` describes each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from poochplan.errors import InfeasibleError, StepError
from poochplan.formats.plan import Decision, Plan, Prediction
from poochplan.formats.profile import Link, Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.planning import plan as planned
from poochplan.profiler.profiling import profile as profiled
from poochplan.profiler.step.forward_only import checked_loss
from poochplan.profiler.step.preserve import preserved
from poochplan.runtime.compiled.inductor import compile_in_place
from poochplan.sessions import apply
from poochplan.torch_private.compiler_internals import compile_module, forget_compiled
from poochplan.units import format_bytes, parse_budget, share_of_peak
from poochplan.verify import StepRecord

ROUNDS = 3
"""Graphs are planned and compiled at most this often."""
DEARER = 0.05
"""If a plan costs more than its graphs predict by this share of a step, a smaller budget for the graphs is tried."""
_BRIEFLY, _TIMED = 2, 3
"""Measured iterations if the user gave no number: for the step compiled without a plan, which is not planned, and for
the one with points."""
_SHARE_OF_LIMIT = 1 / 3
"""Share of a plan's time limit that a plan of the graphs has: its seconds are only shares, and are measured
afterwards.
"""
SHARES = "cpu-core"
"""The roofline that divides a measured step among its ops."""


@dataclass
class Compiling:
    """A step whose model is compiled in different ways, and how it is profiled: see ``poochplan.compile``."""

    step: Callable[[], Any]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    options: dict[str, Any]
    link: Link | None
    """Measured once if none is given."""
    spill_dir: str | Path | None
    throttle: str | float | None
    iterations: int | None
    say: Callable[[str], None]

    def compile(self, replays: tuple[str, ...] | None) -> None:
        """Compiles in place: without points if ``replays`` is None, else with points and these replays in the code."""
        if replays is None:
            forget_compiled()
            compile_module(self.model, **self.options, dynamic=False)
        else:
            compile_in_place(self.model, replays, self.options)

    def bits(self) -> dict[str, str]:
        return bits_of_a_step(self.step, self.model, self.optimizer)

    def measured(self, iterations: int) -> Profile:
        """``iterations``: the number used if the user gave none."""
        found = profiled(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            link=self.link,
            spill_dir=self.spill_dir,
            throttle=self.throttle if self.link is None else None,
            iterations=iterations if self.iterations is None else self.iterations,
            progress=self.say,
        )
        self.link = found.link
        return found


def planned_within(compiling: Compiling, budget: str | int | float, time_limit_s: float) -> Plan:
    """The plan for that budget, with which the model is then compiled; raises what ``compile`` raises."""
    say = compiling.say
    say("compiling the step without a plan")
    compiling.compile(None)
    stock = compiling.bits()
    changing = _first_unlike(stock, compiling.bits())
    if changing:
        raise StepError(
            "compile(): expected a step that gives the same bits when it is repeated from the same model, optimizer "
            f"and generators, found the {changing} to differ; pass a step that reads one batch, and nothing else that "
            "changes from call to call, such as a counter in Python (a buffer of the model can count)"
        )
    measured = compiling.measured(_BRIEFLY)
    budget_bytes = parse_budget(budget, measured.in_core_peak_bytes)
    say("recording the compiled step without memory")
    step, model, optimizer = compiling.step, compiling.model, compiling.optimizer
    graphs = as_measured(profiled(step, model=model, optimizer=optimizer, mode="fake", roofline=SHARES), measured)
    found = _rounds(compiling, graphs, measured, budget_bytes, time_limit_s)
    unequal = _unequal(compiling, found, stock)
    if unequal and found.replays:
        say(f"the {unequal} is not bitwise equal: compiling again without recomputing")
        found = _rounds(compiling, without_replays(graphs), measured, budget_bytes, time_limit_s)
        unequal = _unequal(compiling, found, stock)
    if unequal:
        raise StepError(
            f"compile(): expected the bits of the same model compiled without a plan, found the {unequal} to differ "
            "under one; kernels that are fused otherwise gave other bits: compile its blocks (block.compile()), or "
            "plan it without torch.compile"
        )
    return found


def _unequal(compiling: Compiling, plan: Plan, stock: dict[str, str]) -> str:
    """The first difference between one planned step and one of the model compiled without a plan; empty if they are
    equal.
    """
    compiling.say("comparing one step with that of the model compiled without a plan")
    with apply(plan, compiling.model, spill_dir=compiling.spill_dir, meter="never"):
        return _first_unlike(stock, compiling.bits())


def _first_unlike(stock: dict[str, str], bits: dict[str, str]) -> str:
    return next((name for name in (*stock, *bits) if stock.get(name) != bits.get(name)), "")


def bits_of_a_step(
    step: Callable[[], Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, str]:
    """Digests of the loss, each gradient and each buffer after a step. Model, optimizer and generators stay as they
    were.
    """
    with preserved(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = None
        loss = checked_loss(step(), model)
        torch.autograd.backward(loss)
        gradients = {name: one.grad.detach() for name, one in model.named_parameters() if one.grad is not None}
        buffers = {name: one.detach() for name, one in model.named_buffers()}
        return StepRecord(loss.detach(), gradients, buffers, {}).digests()


def _rounds(compiling: Compiling, graphs: Profile, in_core: Profile, budget_bytes: int, time_limit_s: float) -> Plan:
    """Plans the graphs, compiles and measures the result, and plans that. It repeats this with a smaller goal if the
    result does not fit, or costs far more than its graphs predict: only then is it known how the compiler treats a
    graph with replays. In the end the model is compiled with the cheapest plan.
    """
    found: dict[tuple[str, ...], Plan] = {}
    smallest: dict[tuple[str, ...], int] = {}
    compiled: tuple[str, ...] = ()
    goal_bytes = graph_budget(budget_bytes, graphs, in_core)
    for _ in range(ROUNDS):
        compiling.say("planning what to recompute in compiled code")
        within_goal = _planned_graphs(graphs, goal_bytes, time_limit_s * _SHARE_OF_LIMIT)
        goal_bytes = min(goal_bytes, within_goal.prediction.peak_bytes)  # a smaller goal changes the plan
        replays = recomputed_nodes(graphs, within_goal)
        if replays in found or replays in smallest:
            break
        compiling.say(f"compiling: {len(replays)} tensors recomputed")
        compiling.compile(replays)
        compiled = replays
        measured = compiling.measured(_TIMED)
        compiling.say("planning what to keep and swap")
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
        smallest_bytes = min(smallest.values())
        share = share_of_peak(smallest_bytes, in_core.in_core_peak_bytes)
        raise InfeasibleError(
            f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}) inside the compiled model: "
            f"expected at least {smallest_bytes} bytes ({format_bytes(smallest_bytes)}, {share:.2%} of its in-core "
            "peak); pass that, or make the batch smaller",
            smallest_budget_bytes=smallest_bytes,
        )
    best = min(found, key=lambda one: found[one].prediction.overhead)
    if best != compiled:
        compiling.say(f"compiling the plan with the least cost: {len(best)} tensors recomputed")
        compiling.compile(best)
    return found[best]


def _planned_graphs(graphs: Profile, goal_bytes: int, time_limit_s: float) -> Plan:
    """The plan for that goal; if no plan fits it, the plan for the smallest budget that has one."""
    try:
        return planned(graphs, max(goal_bytes, 1), time_limit_s=time_limit_s, arena="off")
    except InfeasibleError as error:
        return planned(graphs, error.smallest_budget_bytes, time_limit_s=time_limit_s, arena="off")


# -- from profiles and plans alone ------------------------------------------------------------------------------------


def as_measured(graphs: Profile, measured: Profile) -> Profile:
    """The profile of the graphs, with the seconds of the measured step, which are divided among each phase's ops in
    their proportions.

    Link, machine and the runtime's costs are those of the measured step.
    """
    seconds = {Phase.FORWARD: measured.times.forward_s, Phase.BACKWARD: measured.times.backward_s}
    seconds[Phase.OPTIMIZER] = measured.times.optimizer_s
    told = dict.fromkeys(Phase, 0.0)
    for op in graphs.ops:
        told[op.phase] += op.duration_s
    scale = {phase: seconds[phase] / told[phase] if told[phase] > 0 else 1.0 for phase in Phase}
    return msgspec.structs.replace(
        graphs,
        ops=tuple(msgspec.structs.replace(op, duration_s=op.duration_s * scale[op.phase]) for op in graphs.ops),
        times=measured.times,
        link=measured.link,
        device=measured.device,
        runtime=measured.runtime,
        mode=measured.mode,
    )


def recomputed_nodes(profile: Profile, plan: Plan) -> tuple[str, ...]:
    """The nodes, as ``graph/node``, whose saved tensors the plan recomputes; sorted."""
    saves = saved_values(profile)  # a profile with nodes has no sources
    nodes = (
        node
        for number, planned in zip(saves, plan.values, strict=True)
        if planned.decision is Decision.RECOMPUTE
        for node in profile.values[number].nodes
    )
    return tuple(sorted(set(nodes)))


def graph_budget(budget_bytes: int, graphs: Profile, measured: Profile) -> int:
    """The measured step's budget translated to the graphs' profile: as far below that profile's in-core peak."""
    return graphs.in_core_peak_bytes - (measured.in_core_peak_bytes - budget_bytes)


def with_replays(plan: Plan, replays: tuple[str, ...], graphs: Profile) -> Plan:
    """The plan for code in which these nodes are recomputed, with a note about them."""
    if not replays:
        return plan
    wanted = set(replays)
    size_bytes = sum(value.size_bytes for value in graphs.values if wanted.intersection(value.nodes))
    note = f"{len(replays)} values ({format_bytes(size_bytes)}) are recomputed inside compiled graphs"
    return msgspec.structs.replace(plan, replays=replays, notes=(*plan.notes, note))


def without_replays(graphs: Profile) -> Profile:
    """The profile of the graphs, with no value that may be recomputed."""
    why = "kernels that are fused otherwise gave other bits"
    values = (msgspec.structs.replace(one, unreplayable=one.unreplayable or why) for one in graphs.values)
    return msgspec.structs.replace(graphs, values=tuple(values))


def beside_in_core(plan: Plan, in_core: Profile, graphs: Prediction) -> Plan:
    """The plan, with its prediction relative to the step compiled without a plan: its peak, and its seconds. These are
    the seconds of the code with replays that keeps everything, minus the share of replays by ``graphs``, the graphs'
    own prediction.

    The two compiled codes are not timed in one run, and a machine's speed differs from run to run.
    """
    promised = plan.prediction
    share = graphs.in_core_step_s / (graphs.in_core_step_s + graphs.replay_s) if graphs.replay_s else 1.0
    step_s = promised.in_core_step_s * share
    told = msgspec.structs.replace(
        promised,
        in_core_peak_bytes=in_core.in_core_peak_bytes,
        in_core_step_s=step_s,
        overhead=promised.step_s / step_s - 1 if step_s > 0 else 0.0,
        replay_s=promised.replay_s + promised.in_core_step_s - step_s,
    )
    return msgspec.structs.replace(plan, prediction=told)
