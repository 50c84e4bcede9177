"""Runs a workload in-core and under a plan from the same start, compares them bit by bit, and records the figures.

Used by ``pooch run``, the tests, the benchmarks and the notebook.

Equality is exact: the bits of every tensor, so that -0.0 differs from 0.0 and a NaN equals the same NaN.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Host
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import RankRun, RunRecord
from poochplan.profiler.request import ProgressCallback
from poochplan.profiler.step.forward_only import checked_loss
from poochplan.runtime.devices.backend import synchronize
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import leave_out
from poochplan.runtime.run_report import ArenaReport, Report, StepReport
from poochplan.runtime.session import Session
from poochplan.tensors.operators import past_first_calls
from poochplan.torch_private.sharding import local_tensor
from poochplan.torch_private.tensor_internals import without_modes

from .errors import StepError
from .sessions import apply, generators
from .units import format_bytes, format_seconds
from .workload import Workload

Tensors = dict[str, torch.Tensor]
_KINDS = ("gradient", "buffer", "parameter", "generator")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MUCH_OFF = 0.5
"""Smallest relative difference at which a measured time contradicts the profile."""
LEAST_OFF_S = 0.02
"""Smaller differences count as noise of the machine, even in a short step."""
METERED_STEPS = 2
"""A session meters its first two steps, which takes time; see ``poochplan.apply``."""

BuildWorkload = Callable[[], Workload]


@dataclass(frozen=True)
class Run:
    """Steps of one workload, in-core or planned."""

    records: list[StepRecord]
    """One for each compared step; empty if nothing is compared."""
    seconds: list[float]
    """Seconds of each timed step."""
    step_reports: list[StepReport]
    """One for each step under a plan."""
    report: Report | None = None
    """The session's report, for a run under a plan."""
    plan: Plan | None = None
    """The plan that the last step followed or diverged from."""

    @property
    def step_s(self) -> float:
        """Median step time; raises ``ValueError`` if none was timed."""
        if not self.seconds:
            raise ValueError("no timed step; pass timed_steps")
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """A run in-core and one under a plan, and the first tensor that differs between them."""

    in_core: Run
    planned: Run
    difference: str | None
    """Step, kind and name of the first tensor that differs, and by how much; None if all are bitwise equal."""
    compared_steps: int
    compared_tensors: int


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), Python, and numpy if it is loaded. What follows has the same bits each time."""
    past_first_calls()
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def run_steps(
    workload: Workload,
    steps: int,
    *,
    timed_steps: int = 0,
    session: Session | None = None,
    record: bool = True,
    progress: ProgressCallback | None = None,
) -> Run:
    """Runs ``steps`` training steps, recorded if ``record``, and then ``timed_steps`` steps that are timed.

    Each step is ``zero_grad(set_to_none=True)``, forward, backward, ``optimizer.step()``. The caller has entered
    ``session``, if any. Between the two parts, steps run until no timed step is cold or metered. Raises ``StepError``
    if the step returns no scalar loss.
    """
    records: list[StepRecord] = []
    seconds: list[float] = []
    step_reports: list[StepReport] = []
    warm_steps = METERED_STEPS if session is not None else 1
    first_timed = max(steps, warm_steps) if timed_steps else steps
    for index in range(first_timed + timed_steps):
        if progress is not None:
            progress(f"step {index + 1} of {first_timed + timed_steps}")
        is_recorded = record and index < steps
        gradients: Tensors = {}
        elapsed_s, loss = _train(workload, gradients if is_recorded else None)
        if session is not None:
            step_reports.append(copy.copy(session.report().last_step))
        if index >= first_timed:
            seconds.append(elapsed_s)
        if is_recorded:
            model, copies = workload.model, _copies(iter([("", loss)]))
            buffers, parameters = _copies(model.named_buffers()), _copies(model.named_parameters())
            states = _copies(iter(generators(model).items()))
            records.append(StepRecord(copies[""], gradients, buffers, parameters, states, _state_digests(workload)))
        del loss  # otherwise it would be live in the next step, unlike in the profiled one
    if session is None:
        return Run(records, seconds, step_reports)
    return Run(records, seconds, step_reports, session.report(), session.plan)


def _train(workload: Workload, gradients: Tensors | None) -> tuple[float, torch.Tensor]:
    """Runs one step; returns its loss, and its seconds without copying the gradients."""
    drop_gradients(workload)
    _wait_for_device(workload)
    start_s = time.perf_counter()
    loss = checked_loss(workload.step(), workload.model)
    loss.backward()  # type: ignore[no-untyped-call]
    loss = loss.detach()
    copying_s = 0.0
    if gradients is not None:
        _wait_for_device(workload)
        copy_start_s = time.perf_counter()
        gradients.update(_copies((name, p.grad) for name, p in workload.model.named_parameters() if p.grad is not None))
        copying_s = time.perf_counter() - copy_start_s
    if workload.optimizer is not None:
        workload.optimizer.step()
    _wait_for_device(workload)
    return time.perf_counter() - start_s - copying_s, loss


def run_in_core(
    build: BuildWorkload, *, steps: int, timed_steps: int = 3, seed: int = 0, progress: ProgressCallback | None = None
) -> Run:
    """Builds the workload from ``seed`` and runs it with everything kept."""
    seed_everything(seed)
    return run_steps(build(), steps, timed_steps=timed_steps, progress=progress)


def run_planned(
    build: BuildWorkload,
    plan: Plan | PlanSet,
    *,
    steps: int,
    timed_steps: int = 3,
    seed: int = 0,
    record: bool = True,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Run:
    """Builds the workload from ``seed`` and runs it under ``plan``. Options and errors: of ``poochplan.apply``."""
    seed_everything(seed)
    workload = build()
    with apply(plan, workload.model, workload.optimizer, **options) as session:
        return run_steps(workload, steps, timed_steps=timed_steps, session=session, record=record, progress=progress)


def check(
    build: BuildWorkload,
    plan: Plan | PlanSet,
    *,
    steps: int = 3,
    timed_steps: int = 3,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    in_core_build: BuildWorkload | None = None,
    on_any: Callable[[bool], bool] = bool,
    **options: Any,
) -> Comparison:
    """Runs ``steps`` steps in-core and under the plan from the same seed, and compares them bit by bit.

    ``build`` is called for each run and must make a new model. ``in_core_build`` makes the models that run in-core, if
    these differ: for a model compiled with a plan inside, the same one compiled without. ``timed_steps`` further steps
    of each run are only timed; a step time is the median. In-core steps are timed before the session, with no setting
    of a session, and again after it. So a machine that becomes slower or faster meanwhile affects both runs.
    ``options`` are those of ``poochplan.apply``. Ranks that train together run as many steps: ``on_any`` tells each
    whether a fact is true on any of them.

    Raises
    ------
    StepError
        ``build`` returns the same model twice, or the step returns no scalar loss.
    """

    def said(name: str) -> ProgressCallback:
        return lambda text: progress(f"{name}, {text}") if progress is not None else None

    builds, in_core_builds = _fresh(build), _fresh(in_core_build or build)

    def in_core_run(steps: int, timed_steps: int, name: str) -> Run:
        run = run_in_core(in_core_builds, steps=steps, timed_steps=timed_steps, seed=seed, progress=said(name))
        gc.collect()
        return run

    in_core = in_core_run(steps, timed_steps, "in-core")
    told = said("under the plan")
    planned = run_planned(builds, plan, steps=steps, timed_steps=timed_steps, seed=seed, progress=told, **options)
    gc.collect()
    if timed_steps:
        in_core.seconds.extend(in_core_run(0, timed_steps, "in-core again").seconds)
    difference = first_difference(in_core.records, planned.records)
    if on_any(difference is not None):
        again = in_core_run(steps, 0, "again")
        unsteady = first_difference(in_core.records, again.records)
        if difference is not None and unsteady is not None:
            difference += f"; two in-core runs differ as well ({unsteady}), so the workload itself is not deterministic"
    compared = [
        1 + len(one.gradients) + len(one.buffers) + len(one.parameters) + len(one.states) for one in in_core.records
    ]
    return Comparison(in_core, planned, difference, steps, sum(compared))


def _fresh(build: BuildWorkload) -> BuildWorkload:
    """Refuses a model that was built before: the second run would not start where the first did."""
    seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def built() -> Workload:
        workload = build()
        if workload.model in seen:
            raise StepError(
                "the workload's function returned the same model twice; "
                "build a new model in each call, or run without --check"
            )
        seen.add(workload.model)
        return workload

    return built


def _copies(tensors: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    """Copies in host memory: on the device they would take memory from later steps."""
    with without_modes(), aside():  # otherwise a meter would count the copies as part of the step
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        leave_out(copies.values())
    return copies


def drop_gradients(workload: Workload) -> None:
    """As in a training loop before each step."""
    if workload.optimizer is not None:
        workload.optimizer.zero_grad(set_to_none=True)
    workload.model.zero_grad(set_to_none=True)


def _wait_for_device(workload: Workload) -> None:
    for where in {parameter.device for parameter in workload.model.parameters()}:
        synchronize(where)


@dataclass(frozen=True)
class StepRecord:
    """The results of a step: copies, by name."""

    loss: torch.Tensor
    gradients: Tensors
    """Gradients of parameters, before the optimizer's step."""
    buffers: Tensors
    parameters: Tensors
    """After the optimizer's step."""
    generators: Tensors = field(default_factory=dict)
    """States of torch's random number generators at that time, by kind of device."""
    states: dict[str, str] = field(default_factory=dict)
    """Digests of the optimizer's state at that time, by parameter and name."""

    def digests(self) -> dict[str, str]:
        """SHA-256 of dtype, shape and bytes of each tensor, rows in order, by kind and name."""
        named = {f"{kind} {name}": one for kind in _KINDS for name, one in getattr(self, f"{kind}s").items()}
        return {name: _digest(one) for name, one in {"loss": self.loss, **named}.items()}


def _state_digests(workload: Workload) -> dict[str, str]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in workload.model.named_parameters()}
    state: dict[torch.Tensor, Any] = {} if workload.optimizer is None else workload.optimizer.state
    return {
        f"{names.get(parameter, 'another')} {name}": _digest(local_tensor(one))
        for parameter, entries in state.items()
        for name, one in entries.items()
        if isinstance(one, torch.Tensor)
    }


def _digest(tensor: torch.Tensor) -> str:
    with without_modes(), aside():  # otherwise a meter would count the copies as part of the step
        host = tensor.detach().to("cpu", copy=True)  # a zero tensor of autograd has no bytes before
        dense = host.to_dense() if host.layout is not torch.strided else host
        plain = dense.resolve_conj().resolve_neg().contiguous()
        total = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
        if plain.numel():
            total.update(plain.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def first_difference(expected: list[StepRecord], found: list[StepRecord]) -> str | None:
    """Step, kind and name of the first tensor that is not bitwise equal, and by how much; None if all are equal."""
    if len(expected) != len(found):
        return f"{len(expected)} steps against {len(found)}"
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        pairs = [("loss", {"": left.loss}, {"": right.loss})]
        pairs += [(kind, getattr(left, f"{kind}s"), getattr(right, f"{kind}s")) for kind in _KINDS]
        for kind, wanted, seen in pairs:
            for name in (*wanted, *(other for other in seen if other not in wanted)):
                detail = _difference(wanted.get(name), seen.get(name))
                if detail is not None:
                    return f"step {step}: {kind} {name}".rstrip() + f" differs: {detail}"
        for name in (*left.states, *(other for other in right.states if other not in left.states)):
            if left.states.get(name) != right.states.get(name):
                return f"step {step}: optimizer state {name} differs"
    return None


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two dense tensors have the same dtype, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_complex:
        return bitwise_equal(torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj()))
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    word = _WORDS[left.element_size()]
    return torch.equal(left.contiguous().view(word), right.contiguous().view(word))


def _difference(wanted: torch.Tensor | None, seen: torch.Tensor | None) -> str | None:
    if wanted is None or seen is None:
        return (
            "there in-core and missing under the plan" if seen is None else "missing in-core and there under the plan"
        )
    if bitwise_equal(wanted, seen):
        return None
    if wanted.shape != seen.shape or wanted.dtype != seen.dtype:
        return f"{wanted.dtype} {list(wanted.shape)} in-core, {seen.dtype} {list(seen.shape)} under the plan"
    apart = wanted.to(torch.complex128 if wanted.dtype.is_complex else torch.float64) - seen
    return f"{int((wanted != seen).sum())} of {wanted.numel()} elements, by up to {apart.abs().max().item():.3g}"


def run_record(
    planned: Run,
    versions: dict[str, str],
    host: Host,
    *,
    comparison: Comparison | None = None,
    why_not_served: str = "",
) -> RunRecord:
    """The figures of a run under a plan and, if it was compared, of the in-core run.

    Bytes and seconds of one step are medians over its steps. ``why_not_served`` is why no arena could serve them, if
    that is known before the run.
    """
    plan, report = planned.plan, planned.report
    assert plan is not None
    assert report is not None
    prediction, total, memory, arena = plan.prediction, report.total, report.memory, report.arena
    steps = planned.step_reports
    timed = [step for step in steps[1:] if step.peak_bytes is None] or steps
    in_core_s = None if comparison is None else comparison.in_core.step_s
    left_steps = sum(step.fallbacks > 0 for step in steps)
    return RunRecord(
        workload=plan.workload,
        plan_fingerprint=plan.fingerprint,
        versions=versions,
        host=host,
        in_core_peak_bytes=prediction.in_core_peak_bytes,
        budget_bytes=plan.budget_bytes,
        on=plan.on,
        promised_bytes=plan.covered_bytes,
        predicted_peak_bytes=max(prediction.peak_bytes, prediction.first_step_peak_bytes),
        measured_peak_bytes=max((step.peak_bytes for step in steps if step.peak_bytes is not None), default=None),
        in_core_step_s=in_core_s or prediction.in_core_step_s,
        in_core_step_measured=in_core_s is not None,
        predicted_step_s=prediction.step_s,
        planned_step_s=planned.step_s,
        predicted_overhead=prediction.overhead,
        measured_overhead=planned.step_s / (in_core_s or prediction.in_core_step_s) - 1,
        out_bytes=int(statistics.median(step.out_bytes for step in timed)),
        in_bytes=int(statistics.median(step.in_bytes for step in timed)),
        replay_s=statistics.median(step.replay_s for step in timed),
        replayed_values=int(statistics.median(step.replayed_values for step in timed)),
        stall_s=statistics.median(step.stall_s for step in timed),
        contradiction="" if left_steps else contradiction(plan, planned.step_s, in_core_s),
        steps=len(steps),
        left_steps=left_steps,
        fallbacks=total.fallbacks,
        fallback_reasons=tuple(total.fallback_reasons),
        departures=tuple(total.departures),
        bitwise_equal=None if comparison is None else comparison.difference is None,
        difference=None if comparison is None else comparison.difference,
        compared_steps=0 if comparison is None else comparison.compared_steps,
        compared_tensors=0 if comparison is None else comparison.compared_tensors,
        allocated_peak_bytes=None if memory is None else memory.allocated_bytes,
        reserved_peak_bytes=None if memory is None else memory.reserved_bytes,
        arena_bytes=prediction.arena_bytes,
        arena_live_bytes=prediction.arena_live_bytes,
        arena_peak_bytes=prediction.arena_peak_bytes,
        memory=prediction.memory,
        predicted_live_peak_bytes=prediction.live_peak_bytes,
        why_not_served=_why_not_served(arena, why_not_served or ("steps left the plan" if left_steps else "")),
        **({} if arena is None else _served(arena)),
    )


def _served(arena: ArenaReport) -> dict[str, Any]:
    """The fields about the blocks of the last step that the arena served, or should have."""
    why = {"unplanned": "not expected there", "taken": "its place was in use"}
    return {
        "served_arena_bytes": arena.size_bytes or None,
        "served_blocks": arena.served,
        "served_bytes": arena.served_bytes,
        "unserved_blocks": arena.unplanned + arena.taken,
        "unserved_bytes": arena.unplanned_bytes + arena.taken_bytes,
        "unserved": tuple(
            f"{format_bytes(one.size_bytes)} in {one.layer or OUTSIDE}, {why.get(one.why, one.why)}"
            for one in arena.unserved
        ),
    }


def worst_of(records: Sequence[RunRecord]) -> RunRecord:
    """The record of the worst rank, with the results of each; ``records`` are by rank.

    A rank that differs from in-core is worse than one above the budget, and that is worse than one that left the plan.
    Otherwise the largest peak decides, then the longest step.
    """

    def badness(rank: int) -> tuple[bool, bool, int, int, float]:
        one = records[rank]
        is_other = one.difference is not None
        return is_other, one.is_over, one.left_steps, one.measured_peak_bytes or 0, one.planned_step_s

    worst = max(range(len(records)), key=badness)
    names = RankRun.__struct_fields__
    ranks = tuple(RankRun(**{name: getattr(one, name) for name in names}) for one in records)
    return msgspec.structs.replace(records[worst], rank=worst, ranks=ranks)


def contradiction(plan: Plan, planned_s: float, in_core_s: float | None) -> str:
    """One line if the measured time differs from the profile's by more than half of that; else empty.

    If both timed the in-core step by PyTorch alone (``--check``), these times are compared; else the planned step with
    its prediction. Differences below 20 ms do not count. Assumed times are not compared.
    """
    prediction = plan.prediction
    if plan.estimate:
        return ""
    what, found_s, said_s, source = "planned", planned_s, prediction.step_s, "the plan predicts"
    if in_core_s is not None and prediction.is_timed_alone:
        what, found_s, said_s, source = "in-core", in_core_s, prediction.in_core_step_s, "the profile says"
    if abs(found_s - said_s) <= max(LEAST_OFF_S, MUCH_OFF * said_s):
        return ""
    return (
        f"the {what} step took {format_seconds(found_s)}, where {source} {format_seconds(said_s)}: the machine was "
        "busy during one of the two; profile again, and plan from that"
    )


def _why_not_served(arena: ArenaReport | None, known: str) -> str:
    """Why no step was served, in one line; empty if one was."""
    if arena is None:
        return known or "the first steps are ordinary, and no step came behind them; raise --timed"
    if arena.larger_bytes:
        return f"the arena would be {format_bytes(arena.larger_bytes)} above what the budget has room for"
    return ""
