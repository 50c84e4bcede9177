"""Runs a workload in-core and under a plan from the same start, and compares them bit by bit.

Used by ``pooch run``, the tests, the benchmarks and the notebook.

Equality is exact: the bits of every tensor, so that -0.0 differs from 0.0 and a NaN equals the same NaN.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from poochplan.formats.plan_set import PlanSet
from poochplan.formats.run_record import Certificate, StepDigests
from poochplan.profiler.step.forward_only import checked_loss
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.session import Session
from poochplan.runtime.watch.census import leave_out
from poochplan.tensors.operators import past_first_calls
from poochplan.torch_private.tensor_internals import without_modes

from .certificates import certificate, digest, digests, generators
from .errors import StepError
from .sessions import apply
from .workload import Workload

Tensors = dict[str, torch.Tensor]
_KINDS = ("gradient", "buffer", "parameter", "generator")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.runtime.run_report import Report, StepReport

METERED_STEPS = 2
"""A session meters its first two steps, which takes time; see ``poochplan.apply``."""

Build = Callable[[], Workload]
Progress = Callable[[str], None]


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
    progress: Progress | None = None,
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
            records.append(_record(workload, loss, gradients))
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
    build: Build, *, steps: int, timed_steps: int = 3, seed: int = 0, progress: Progress | None = None
) -> Run:
    """Builds the workload from ``seed`` and runs it with everything kept."""
    seed_everything(seed)
    return run_steps(build(), steps, timed_steps=timed_steps, progress=progress)


def run_planned(
    build: Build,
    plan: Plan | PlanSet,
    *,
    steps: int,
    timed_steps: int = 3,
    seed: int = 0,
    record: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Builds the workload from ``seed`` and runs it under ``plan``. Options and errors: of ``poochplan.apply``."""
    seed_everything(seed)
    workload = build()
    with apply(plan, workload.model, **options) as session:
        return run_steps(workload, steps, timed_steps=timed_steps, session=session, record=record, progress=progress)


def check(
    build: Build,
    plan: Plan | PlanSet,
    *,
    steps: int = 3,
    timed_steps: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
    in_core_build: Build | None = None,
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
    say = progress or (lambda text: None)
    builds, in_core_builds = _Fresh(build), _Fresh(in_core_build or build)

    def in_core_run(steps: int, timed_steps: int, name: str) -> Run:
        said = _prefixed(say, name)
        run = run_in_core(in_core_builds, steps=steps, timed_steps=timed_steps, seed=seed, progress=said)
        gc.collect()
        return run

    in_core = in_core_run(steps, timed_steps, "in-core")
    said = _prefixed(say, "under the plan")
    planned = run_planned(builds, plan, steps=steps, timed_steps=timed_steps, seed=seed, progress=said, **options)
    gc.collect()
    if timed_steps:
        in_core.seconds.extend(in_core_run(0, timed_steps, "in-core again").seconds)
    difference = first_difference(in_core.records, planned.records)
    if on_any(difference is not None):
        again = in_core_run(steps, 0, "again")
        unsteady = first_difference(in_core.records, again.records)
        if difference is not None and unsteady is not None:
            difference += f"; two in-core runs differ as well ({unsteady}), so the workload itself is not deterministic"
    return Comparison(in_core, planned, difference, steps, _count(in_core.records))


def _prefixed(say: Progress, name: str) -> Progress:
    return lambda text: say(f"{name}, {text}")


def certificate_of(compared: Comparison, seed: int) -> Certificate:
    """The certificate of a comparison; ``seed`` is that of its runs."""
    plan = compared.planned.plan
    assert plan is not None
    return certificate(
        plan,
        plan.device,
        seed=seed,
        equal=compared.difference is None,
        in_core=tuple(record.digests() for record in compared.in_core.records),
        planned=tuple(record.digests() for record in compared.planned.records),
    )


class _Fresh:
    """Calls ``build`` and refuses a model that it has seen before: the second run would not start where the first
    did.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __call__(self) -> Workload:
        workload = self._build()
        if workload.model in self._seen:
            raise StepError(
                "the workload's function returned the same model twice; "
                "build a new model in each call, or run without --check"
            )
        self._seen.add(workload.model)
        return workload


def _count(records: list[StepRecord]) -> int:
    return sum(1 + len(record.gradients) + len(record.buffers) + len(record.parameters) for record in records)


def _record(workload: Workload, loss: torch.Tensor, gradients: Tensors) -> StepRecord:
    model = workload.model
    buffers, parameters = _copies(model.named_buffers()), _copies(model.named_parameters())
    states = _copies(iter(generators(model).items()))
    return StepRecord(_copies(iter([("", loss)]))[""], gradients, buffers, parameters, states)


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
    for where in {parameter.device for parameter in workload.model.parameters() if parameter.is_cuda}:
        torch.cuda.synchronize(where)


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

    def digests(self) -> StepDigests:
        """Digests of all of these."""
        of_kinds = {f"{kind}s": digests(getattr(self, f"{kind}s").items()) for kind in _KINDS}
        return StepDigests(loss=digest(self.loss), **of_kinds)


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
