"""Session: a block of training steps that follow a plan, or several models' plans."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.runtime.devices.cuda import hard_cap
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.transfers import forget_held_back, raise_held_back
from poochplan.runtime.drivers.diagnosis import Expected
from poochplan.runtime.drivers.follow import DivergencePolicy
from poochplan.runtime.drivers.planned import ByModel, Planned
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.step_events import StepEvents, weakly
from poochplan.runtime.watch.keeper import BudgetKeeper, MeteredSteps
from poochplan.runtime.watch.step_meter import StepMeter, When
from poochplan.runtime.watch.tally import Accounts
from poochplan.runtime.watch.users_line import users_line

from .attachment import Attachment
from .run_report import MemoryPeaks, Report
from .serving import Serving


class Session:
    """A context manager, with the states of its :class:`~.attachment.Attachment`.

    It is held by whoever has entered it, and by nothing of its own: where that ends without leaving the block, so does
    the session.

    Parameters
    ----------
    plans, models: by the names of the models; a lone one has the name "".
    keeper: what is done about steps that take more than their budgets.
    serving: from where the blocks of steps come; None for the ordinary allocator.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan | PlanSet],
        models: Mapping[str, torch.nn.Module],
        device: Callable[[], Device],
        *,
        on_divergence: DivergencePolicy,
        meter: When,
        cap_bytes: int | None,
        keeper: BudgetKeeper,
        serving: Serving | None = None,
    ) -> None:
        self._plans = {name: plan.plans if isinstance(plan, PlanSet) else (plan,) for name, plan in plans.items()}
        every = [one for plans_of in self._plans.values() for one in plans_of]
        self._first = every[0]
        """Device and link are the same for all of them."""
        self._models = models
        self._cap_bytes = cap_bytes
        promised = self._first.prediction
        self._meter = StepMeter(self._first.device, meter, promised.memory)
        self._is_metered = meter != "never"
        self._metered = MeteredSteps(self._meter, keeper, models)
        self._serving = serving
        self._accounts = Accounts(models)
        self._memory: MemoryPeaks | None = None
        self._gradients_checked = False
        self._is_ending = False
        self._choosers = {
            name: Planned(
                plan if isinstance(plan, PlanSet) else plan.instructions,
                on_divergence,
                expected=Expected(self._plans[name][0].inputs, models[name]),
            )
            for name, plan in plans.items()
        }
        self._attachment = Attachment(
            models,
            self._first.device,
            device,
            self._choosers[""] if "" in self._choosers else ByModel(self._choosers),
            chosen=weakly(self, Session._check_gradients),
            began=weakly(self, Session._step_begins),
            ended=weakly(self, Session._end_of_step),
            elsewhere=self._accounts.tally.called_elsewhere,
            gives_up=any(value.decision is not Decision.KEEP for one in every for value in one.values),
            events=StepEvents(
                point=weakly(self, Session._point) if serving is not None or self._is_metered else None,
                backward=weakly(self, Session._backward),
                over=weakly(self, Session._step_is_over),
                departed=weakly(self, Session._departed),
                resting=weakly(self, Session._resting),
                optimizing=weakly(self, Session._optimizing),
            ),
        )

    def __enter__(self) -> Session:
        if self._state != "new":
            raise UsageError(f"this session is {self._state}; call apply(plan, model) for a new one")
        with ExitStack() as stack:  # undone when one of these fails
            stack.enter_context(self._attachment)
            if self._cap_bytes is not None:
                stack.enter_context(hard_cap(self._device.where, self._cap_bytes))
            self._reserve_host()
            stack.callback(self._meter.close)
            if self._serving is not None:
                stack.callback(self._serving.close)
            if self._is_metered:
                gc.collect()  # of what came before, a profile among it, nothing is to count that nobody holds
            self._device.start_peaks()
            self._leave = weakref.finalize(self, _close, self.engine, stack.pop_all())
            self._leave.atexit = False
            self._attachment.leave = self._leave
        return self

    @property
    def model(self) -> torch.nn.Module:
        """The model; of several, one module that has them all."""
        return self._attachment.whole

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

    def _reserve_host(self) -> None:
        planned_bytes = self.engine.host.planned_bytes
        try:
            self._device.reserve_host(planned_bytes)
        except OSError as error:
            warnings.warn(
                f"poochplan: the host tier cannot hold the planned {planned_bytes} bytes ({error.strerror}); "
                "values that do not fit are kept",
                RuntimeWarning,
                stacklevel=users_line(),
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "closed":  # it was ended where it had been left open
            return
        try:
            self._is_ending = True
            self._meter.step_is_over()
            self.engine.end()
            self._end_of_step(self.engine.segment, settle=kind is None)
            self.engine.tell_driver()
            self._memory = self._device.peaks()  # what comes later is not the session's
        finally:
            self._leave()
        if kind is None or not issubclass(kind, KeyboardInterrupt):  # then it has been heard
            raise_held_back()
        forget_held_back()
        if kind is None:
            for complaint in self._accounts.tally.complaints():
                warnings.warn(f"poochplan: {complaint}", RuntimeWarning, stacklevel=users_line())

    def step(self, model: str | None = None) -> None:
        """Says that a new step begins here; from the first call on steps begin only where this is called.

        Needed when a step calls the model more than once and lets go of all that the first call saved, or when an
        earlier forward is still waiting for its backward. Of several models, ``model`` names the one whose step it is:
        needed where its step calls another one first. Without a name it is of the model that is called first.
        """
        if self._state != "open":
            raise UsageError(
                f"step(): expected an open session, found a {self._state} one; call it inside the with block"
            )
        if model is not None and model not in self._models:
            names = ", ".join(map(repr, self._models)) if "" not in self._models else "none, for there is one model"
            raise UsageError(f"step(): expected the name of a model of this session ({names}), found {model!r}")
        self._attachment.begin_segment(model)

    @property
    def plan(self) -> Plan:
        """The plan that the current step follows, or diverged from; of a set, the first until a step has picked one.

        Of several models, that of the model whose step it is; the first one's before there is any.
        """
        if self._state == "new":
            return self._first
        name = self._name(self.engine.segment)
        instructions = self._choosers[name].instructions
        return next(plan for plan in self._plans[name] if plan.instructions is instructions)

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
        segment, plan = self.engine.segment, self.plan
        self._metered.take_peak(segment)
        memory = self._device.peaks() if self._state == "open" else self._memory
        arena = self._serving.report(plan) if self._serving is not None else None
        return self._accounts.report(segment, self._name(segment), plan, memory, arena)

    def _name(self, segment: Segment) -> str:
        """Of the model that a segment is of."""
        return segment.model if segment.model is not None else next(iter(self._choosers))

    # -- told by the attachment ----------------------------------------------------------------------------------

    def _step_begins(self, segment: Segment) -> None:
        self._meter.step_begins(self.engine, self._device)

    def _point(self, passed: int) -> None:
        self._meter.point()
        if self._serving is None:
            return
        if passed > 1:
            self._serving.at(passed)
        elif self.engine.follows is not None:
            self._serving.begin(self.plan, self.engine.segment)
            self._meter.served_from(self._serving.arena_bytes)
        else:
            self._serving.stands_aside()
            self._meter.served_from(0)

    def _backward(self, begins: bool) -> None:
        self._meter.backward(begins)

    def _optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        if self._serving is not None:
            self._serving.optimizer_steps(optimizer)

    def _resting(self) -> None:
        if self._serving is not None:
            self._serving.rests()

    def _departed(self) -> None:
        if self._serving is not None:
            self._serving.departed()

    def _step_is_over(self, segment: Segment) -> None:
        if self._serving is not None:
            self._serving.step_is_over()
        self._meter.step_is_over()
        self._metered.take_peak(segment)
        self._look(segment)

    def _end_of_step(self, segment: Segment, *, settle: bool = True) -> None:
        self._meter.step_is_over()
        if not self._accounts.is_new(segment):
            return
        self._metered.take_peak(segment)
        name = self._name(segment)
        self._accounts.count(segment, name, self.plan.instructions)
        if settle:
            self._look(segment)
            self._metered.settle(segment, self._accounts.tally.steps_of(name), name, self.plan)

    def _look(self, segment: Segment) -> None:
        name, before = self._name(segment), self.plan
        changed = self._metered.look(segment, self.engine, name, before, is_last=self._is_ending)
        if changed is not None:
            self._plans[name] = (changed,)
            self._choosers[name].follow(changed.instructions)
            self.engine.host.grow(self._choosers[name].alternatives)
            if self._serving is not None:
                self._serving.forget(before)

    def _check_gradients(self) -> None:
        live_bytes = self.engine.segment.gradient_bytes
        if self._gradients_checked or not live_bytes or self.plan.gradients_live_through_forward:
            return
        self._gradients_checked = True
        warnings.warn(
            f"poochplan: gradients of an earlier step ({live_bytes} bytes) are still there in forward, the plan was "
            "made without; call optimizer.zero_grad(set_to_none=True) before the step, or profile with accumulate",
            RuntimeWarning,
            stacklevel=users_line(),
        )


def _close(engine: Engine, stack: ExitStack) -> None:
    """Takes everything off model and torch."""
    try:
        engine.end()
    finally:
        stack.close()
