"""traced_step: a workload under its plan for a few steps, the last of which is measured op by op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Phase
from poochplan.profiler.step.forward_only import checked_loss
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.report.inspection.step_trace import STEP, StepTrace
from poochplan.runtime.applying import apply
from poochplan.runtime.devices.opening import model_device
from poochplan.runtime.session import Session
from poochplan.tensors.modes import around_compiled
from poochplan.verify import METERED_STEPS, seed_everything
from poochplan.workload import Workload

from .step_log import StepLog
from .traced_devices import traced_device
from .tracing_meter import TracingMeter


def traced_step(
    build: Callable[[], Workload],
    plan: Plan | PlanSet,
    *,
    seed: int = 0,
    spill_dir: str | Path | None = None,
    force: bool = False,
) -> StepTrace:
    """Builds the workload, trains it under ``plan`` until steps are alike, and measures one step more.

    Measuring takes some 10 us an op, so that the traced step is slower than it is without; ``pooch run`` has timed it
    before. On CUDA compute and copies are timed by events on their streams. Raises what ``poochplan.apply`` raises.
    """
    seed_everything(seed)
    workload = build()
    first = plan.plans[0] if isinstance(plan, PlanSet) else plan
    where = model_device(workload.model, first.device)
    log, tracker = StepLog(where), LayerTracker()
    meter = TracingMeter(where.type, log, tracker)
    opened = lambda: traced_device(where, spill_dir, first.link.throttle_bytes_per_s, log)  # noqa: E731
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(apply(plan, workload.model, device=opened, meter="always", force=force))
        stack.enter_context(tracker.on(workload.model))
        stack.enter_context(around_compiled(workload.model, meter.compiled))
        stack.enter_context(_on(meter))
        for tensor in (*workload.model.parameters(), *workload.model.buffers()):
            meter.watch(tensor)
        for _ in range(METERED_STEPS):
            _train(workload, log)
        log.start()
        log.live(meter.live_bytes)
        _train(workload, log)
        end = log.clock.mark()
        log.stop()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return _trace_of(session, log, log.clock.seconds(end))


def _trace_of(session: Session, log: StepLog, step_s: float) -> StepTrace:
    report, plan = session.report().last_step, session.plan
    memory = log.memory(step_s)
    assert plan is not None, "it was given"
    return StepTrace(
        workload=plan.workload,
        source="measured",
        budget_bytes=plan.budget_bytes,
        step_s=step_s,
        bars=log.bars(),
        memory=memory,
        facts={
            "peak_bytes": memory.peak_bytes,
            "predicted_peak_bytes": plan.prediction.peak_bytes,
            "out_bytes": report.out_bytes,
            "in_bytes": report.in_bytes,
            "fallbacks": report.fallbacks,
        },
    )


def _train(workload: Workload, log: StepLog) -> None:
    """One step, as ``pooch run`` trains."""
    if workload.optimizer is not None:
        workload.optimizer.zero_grad(set_to_none=True)
    workload.model.zero_grad(set_to_none=True)
    with log.block(STEP, Phase.FORWARD, ""):
        loss = checked_loss(workload.step(), workload.model)
    with log.block(STEP, Phase.BACKWARD, ""):
        loss.backward()  # type: ignore[no-untyped-call]
    loss = loss.detach()
    with log.block(STEP, Phase.OPTIMIZER, ""):
        if workload.optimizer is not None:
            workload.optimizer.step()


@contextlib.contextmanager
def _on(meter: TracingMeter) -> Iterator[None]:
    meter.switch_on()
    try:
        yield
    finally:
        meter.switch_off()
