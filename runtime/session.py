"""Session: a block of training steps that follow a plan, with the hooks that it takes on torch and on the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Any

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.runtime.devices.cuda import hard_cap, refuse_capture, refuse_graphs
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.transfers import forget_held_back, raise_held_back
from poochplan.runtime.drivers.follow import DivergencePolicy
from poochplan.runtime.drivers.planned import Planned
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.malloc import freed_memory_given_back
from poochplan.tensors.modes import (
    around_compiled,
    before_forward,
    uncompiled_hooks,
    where_forward_raises,
)
from poochplan.tensors.signatures import input_signature, tensor_leaves
from poochplan.tensors.torch_private import in_backward

from .budget_watch import BudgetWatch
from .meter import LiveBytesMeter
from .one_session import entered
from .optimizer_steps import after_optimizer_steps
from .run_report import MemoryPeaks, Report, StepReport


class Session:
    """A context manager. States: *new*, *open* (inside the block), *away* (in-core for a while), *closed*.

    After the block handles that are still alive can be unpacked (backward outside the ``with``); the host tier is given
    back with the last of them, and the C library's allocator goes back to keeping what is freed
    (:mod:`poochplan.tensors.malloc`).
    """

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
        self._given = plan
        self._plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
        self._first = self._plans[0]
        """Device and link are the same for every plan of a set."""
        self.model = model
        self._open_device = device
        self._cap_bytes = cap_bytes
        self._on_divergence = on_divergence
        self._meter_when = meter
        self._meter = LiveBytesMeter(self._first.device, ALLOCATION_UNIT_BYTES)
        self._total = StepReport()
        self._memory: MemoryPeaks | None = None
        self._state = "new"
        self._thread: int | None = None
        self._gradients_checked = False
        self._watch = BudgetWatch()
        self._stack = ExitStack()
        self._held = ExitStack()
        """What lasts until the last handle is gone: the device, and how its memory is given back."""

    def __enter__(self) -> Session:
        if self._state != "new":
            raise UsageError(f"this session is {self._state}; call apply(plan, model) for a new one")
        with ExitStack() as stack:  # undone when one of these fails
            if self._first.device == "cuda":
                refuse_graphs(self.model)
            stack.enter_context(entered(self))
            stack.callback(self._let_go)
            if self._first.device == "cpu" and self._gives_anything_up:
                self._held.enter_context(freed_memory_given_back())
            self._device = self._held.enter_context(closing(self._open_device()))
            if self._cap_bytes is not None:
                stack.enter_context(hard_cap(self._device.where, self._cap_bytes))
            given = self._given if isinstance(self._given, PlanSet) else self._given.instructions
            self._chooser = Planned(given, self._on_divergence)
            self.engine = Engine(
                self._chooser,
                self._device,
                self.model,
                observers=[self._meter],
                on_segment_end=self._end_of_step,
                on_idle=self._idle,
            )
            self._reserve_host()
            stack.enter_context(around_compiled(self.model, self._without_modes))
            stack.enter_context(before_forward(self.model, self._forward_begins))
            stack.enter_context(where_forward_raises(self.model, self._forward_raised))
            stack.enter_context(after_optimizer_steps(self.model, self._optimizer_stepped))
            self._hooks = uncompiled_hooks(self.engine.pack, self.engine.unpack)
            stack.enter_context(self._hooks)
            stack.callback(self._meter.switch_off)
            self._device.start_peaks()
            if self._meter_when != "never":
                self._start_meter()
            self._state, self._thread = "open", threading.get_ident()
            self._stack = stack.pop_all()
        return self

    @property
    def _gives_anything_up(self) -> bool:
        return any(value.decision is not Decision.KEEP for plan in self._plans for value in plan.values)

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
            self._state = "closed"
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
        self.engine.cursor.announced()
        self._begin_step()

    @property
    def thread(self) -> int | None:
        """The thread whose steps follow the plan: from the block's begin to its end, but for while it is away."""
        return self._thread if self._state == "open" else None

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
        if self._state != "open":
            raise UsageError(f"away(): expected an open session, found a {self._state} one")
        self._state = "away"
        with self.engine.quiet():
            self._hooks.__exit__()
            try:
                yield
            finally:
                self._hooks.__enter__()
                self._state = "open"

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

    # -- called by the engine and by torch --------------------------------------------------------------------

    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins at the first forward after a backward, or when nothing of the last one is held any more."""
        if self._state == "away" or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return
        if in_backward():  # a checkpoint of the user's runs forward again in backward
            return
        if self._first.device == "cuda":
            refuse_capture()
        if self.engine.cursor.forward_begins_one():
            self._begin_step()
            leaves = (*tensor_leaves("", args), *tensor_leaves("", kwargs))
            self.engine.tape.is_given(tensor for _, tensor in leaves)
        if self.engine.model_is_called(lambda: input_signature(args, kwargs)):
            self._check_gradients()

    def _forward_raised(self) -> None:
        if self._state == "open" and threading.get_ident() == self._thread and not in_backward():
            self.engine.forward_raised()

    def _optimizer_stepped(self) -> None:
        if self._state == "open" and threading.get_ident() == self._thread:
            self.engine.optimizer_stepped()

    def _begin_step(self) -> None:
        self.engine.begin()
        if not self.engine.awaits_inputs:
            self._check_gradients()

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

    def _idle(self) -> None:
        if self._state == "closed":
            self._held.close()

    def _let_go(self) -> None:
        if self._state == "new" or not self.engine.cursor.holds_values:  # otherwise with the last of them
            self._held.close()

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

    def _without_modes(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.engine.quiet():
                return call(*args, **kwargs)

        return quiet
