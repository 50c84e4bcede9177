"""Session: a block of training steps that follow a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.runtime.devices.cuda import hard_cap
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.transfers import forget_held_back, raise_held_back
from poochplan.runtime.drivers.follow import DivergencePolicy
from poochplan.runtime.drivers.planned import Planned
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.handle import Handle
from poochplan.tensors.modes import compiled_modules

from .attachment import Attachment, Hooks, own_hooks
from .budget_watch import BudgetWatch
from .metering.meter import LiveBytesMeter
from .run_report import MemoryPeaks, Report, StepReport


class Session:
    """A context manager, with the states of its :class:`~.attachment.Attachment`."""

    def __init__(
        self,
        plan: Plan | PlanSet,
        model: torch.nn.Module,
        device: Callable[[], Device],
        *,
        on_divergence: DivergencePolicy,
        meter: str,
        cap_bytes: int | None,
    ) -> None:
        self._plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
        self._first = self._plans[0]
        """Device and link are the same for every plan of a set."""
        self.model = model
        self._cap_bytes = cap_bytes
        self._meter_when = meter
        self._meter = LiveBytesMeter(self._first.device, ALLOCATION_UNIT_BYTES)
        self._total = StepReport()
        self._memory: MemoryPeaks | None = None
        self._gradients_checked = False
        self._watch = BudgetWatch()
        self._stack = ExitStack()
        self._chooser = Planned(plan if isinstance(plan, PlanSet) else plan.instructions, on_divergence)
        self._attachment = Attachment(
            {"": model},
            self._first.device,
            device,
            self._chooser,
            chosen=self._check_gradients,
            ended=self._end_of_step,
            observers=[self._meter],
            hooks=self._hooks,
            gives_up=any(value.decision is not Decision.KEEP for one in self._plans for value in one.values),
        )

        self._attachment.around_region = self._around_region

    def __enter__(self) -> Session:
        if self._state != "new":
            raise UsageError(f"this session is {self._state}; call apply(plan, model) for a new one")
        with ExitStack() as stack:  # undone when one of these fails
            stack.enter_context(self._attachment)
            if self._cap_bytes is not None:
                stack.enter_context(hard_cap(self._device.where, self._cap_bytes))
            self._reserve_host()
            stack.callback(self._meter.switch_off)
            self._device.start_peaks()
            if self._meter_when != "never":
                self._start_meter()
            self._stack = stack.pop_all()
        return self

    @property
    def engine(self) -> Engine:
        """What carries the plan out; there is one from the block's begin on."""
        return self._attachment.engine

    @property
    def _device(self) -> Device:
        return self._attachment.device

    @property
    def _state(self) -> str:
        return self._attachment.state

    def _start_meter(self) -> None:
        self.engine.mechanism.timed = True
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._meter.watch(tensor)
        self._meter.switch_on()

    def _reserve_host(self) -> None:
        planned_bytes = self.engine.host.planned_bytes
        try:
            self._device.reserve_host(planned_bytes)
        except OSError as error:
            warnings.warn(
                f"poochplan: the host tier cannot hold the planned {planned_bytes} bytes ({error.strerror}); "
                "values that do not fit are kept",
                RuntimeWarning,
                stacklevel=3,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.engine.end()
            self.engine.mechanism.take_times()
            self._take_peak(self.engine.segment.report)
            self.engine.tell_driver()
            self._memory = self._device.peaks()  # what comes later is not the session's
        finally:
            self._stack.close()
        if kind is None or not issubclass(kind, KeyboardInterrupt):  # then it has been heard
            raise_held_back()
        forget_held_back()

    def step(self) -> None:
        """Says that a new step begins here; from the first call on steps begin only where this is called.

        Needed when a step calls the model more than once and lets go of all that the first call saved, or when an
        earlier forward is still waiting for its backward.
        """
        if self._state != "open":
            raise UsageError(
                f"step(): expected an open session, found a {self._state} one; call it inside the with block"
            )
        self._attachment.begin_segment()

    @property
    def plan(self) -> Plan:
        """The plan that the current step follows, or diverged from; of a set, the first until a step has picked one."""
        if self._state == "new":
            return self._first
        return next(plan for plan in self._plans if plan.instructions is self._chooser.instructions)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Steps inside run in-core, as if there were no session: to set planned steps beside, in the same process.

        Between steps only, and on the level of the ``with`` block: inside other saved-tensors hooks it would take off
        those.
        """
        with self._attachment.away():
            yield

    def report(self) -> Report:
        """What the steps so far did; a step counts as ended when the next begins or nothing of it is held any more."""
        if self._state == "new":
            raise UsageError(
                "report(): expected a session that has been entered; use `with apply(plan, model) as session`"
            )
        self.engine.mechanism.take_times()
        last = self.engine.segment.report
        self._take_peak(last)
        plan = self.plan
        total = StepReport()
        total.add(self._total)
        if last.steps:
            total.add(last)
        return Report(
            last_step=last,
            total=total,
            predicted_peak_bytes=plan.prediction.peak_bytes,
            predicted_first_step_peak_bytes=plan.prediction.first_step_peak_bytes,
            budget_bytes=plan.budget_bytes,
            memory=self._device.peaks() if self._state == "open" else self._memory,
        )

    # -- told by the attachment ----------------------------------------------------------------------------------

    def _hooks(self, engine: Engine) -> Hooks:
        """The engine's; where the meter has to hear of what compiled regions save, it is told first."""
        if self._meter_when == "never" or not compiled_modules(self.model):
            return own_hooks(engine)

        def pack(tensor: torch.Tensor) -> Handle:
            self._meter.saved(tensor)
            return engine.pack(tensor)

        return pack, engine.unpack

    def _around_region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._meter.around_region(call) if self._meter.is_on else call

    def _end_of_step(self, segment: Segment) -> None:
        self._take_peak(segment.report)
        self._total.add(segment.report)
        self._meter.restart()
        is_settled = self._watch.is_settled(self._total.steps, segment.report.peak_bytes or 0, self.plan)
        if self._meter_when == "first-steps" and is_settled:
            self._meter.switch_off()
            self.engine.mechanism.timed = False

    def _take_peak(self, stats: StepReport) -> None:
        if self._meter.is_on:
            stats.peak_bytes = self._meter.peak_bytes
            if stats.steps and not stats.fallbacks:  # otherwise it has been told why
                self._watch.look(self._meter.peak_bytes, self.plan)

    def _check_gradients(self) -> None:
        live_bytes = self.engine.segment.gradient_bytes
        if self._gradients_checked or not live_bytes or self.plan.gradients_live_through_forward:
            return
        self._gradients_checked = True
        warnings.warn(
            f"poochplan: gradients of an earlier step ({live_bytes} bytes) are still there in forward, the plan was "
            "made without; call optimizer.zero_grad(set_to_none=True) before the step, or profile with accumulate",
            RuntimeWarning,
            stacklevel=2,
        )
