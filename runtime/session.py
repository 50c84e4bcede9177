"""Session: a block of training steps, each of which follows a plan, or is studied until there is one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType, TracebackType

import torch

from poochplan.errors import AuditError, SpillError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.guard import is_about_arguments
from poochplan.runtime.devices.allocator import settled
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.audit import Comparison, OnAudit, differences_text
from poochplan.runtime.engine.cursor import Segment, StepEvents, nothing, weakly
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.messages import HOST_IS_FULL, Messages
from poochplan.runtime.metering.holders import held_beside
from poochplan.runtime.metering.step_meter import StepMeter, When, described
from poochplan.runtime.metering.watch import MostBytes, Watch
from poochplan.runtime.step_totals import StepTotals
from poochplan.units import format_bytes

from .active_plan import ActivePlan, OverBudget, out_of_memory_text
from .arena.step_arena import StepArena
from .attachment import Attachment
from .budget_keeper import FROM_TORCH, BudgetKeeper
from .optimizer_state.steps import SteppedInChunks
from .plan_source import KEPT_FROM_NOW_ON, Planner, PlanSource, StepObserver
from .run_report import ArenaReport, MemoryPeaks, Report, StepReport


class Session:
    """A context manager, with the states of its :class:`~.attachment.Attachment`: *new*, *open*, *away*, *closed*.

    :func:`poochplan.apply`, :func:`poochplan.auto`, :func:`poochplan.compile` and the callbacks of trainers return
    one. Only its user holds a reference to it. When nothing refers to it any more, it ends, even inside the block.
    Its options are those of :func:`poochplan.apply`. Its meter counts the memory that its first plan predicts.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        where: torch.device,
        open_device: Callable[[], ComputeDevice],
        source: PlanSource,
        observer: StepObserver | None = None,
        *,
        on_over_budget: OverBudget = OverBudget.WARN,
        meter: When = "first-steps",
        cap_bytes: int | None = None,
        planner: Planner | None = None,
        step_arena: StepArena | None = None,
        messages: Messages | None = None,
        is_guarded: bool = True,
        on_audit: OnAudit = OnAudit.OFF,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._models, self._source, self._optimizers = models, source, weakref.WeakSet(optimizers)
        observer = observer or StepObserver(source)
        self._book, self._observer = source.book, observer
        self._on_over_budget, self._cap_bytes, self._planner = on_over_budget, cap_bytes, planner
        self._step_arena = step_arena or StepArena(None, "off")
        self._messages, self._meter = messages or Messages(is_quiet=True), StepMeter(where.type, meter)
        self._is_metered, self._on_audit = meter != "never", on_audit
        self._totals = StepTotals(models)
        self._memory: MemoryPeaks | None = None
        self._gradients_checked = False
        self._keeper = BudgetKeeper(source, self._meter, self._step_arena, self._messages, on_over_budget)
        events = StepEvents(
            chosen=weakly(self, Session._chosen),
            point=weakly(self, Session._point) if self._step_arena.is_possible or self._is_metered else nothing,
            backward=self._meter.backward,
            over=weakly(self, Session._step_is_over),
            ended=weakly(self, Session._ended),
            departed=self._step_arena.departed,
            resting=weakly(self, Session._resting),
            rests=weakly(self, Session._rests),
            outgrown=weakly(self, Session._outgrown),
            optimizing=weakly(self, Session._optimizing),
            releases=self._step_arena.note if self._step_arena.is_possible else nothing,
            finds=self._step_arena.again,
            elsewhere=self._totals.called_elsewhere,
        )
        self._attachment = Attachment(models, where.type, open_device, source, observer, events, is_guarded=is_guarded)
        if self._attachment.guard is not None and on_over_budget is OverBudget.ERROR:
            self._attachment.guard.asked_for += (SpillError,)  # of a value that must not stay on the device

    def __enter__(self) -> Session:
        if self._attachment.state != "new":
            raise UsageError(f"this session is {self._state}; call {self._opened_by} for a new one")
        stack = self._stack = ExitStack()
        self._leave = weakref.finalize(self, stack.close)
        self._leave.atexit = False
        try:
            stack.callback(self._source.close)
            stack.callback(self._observer.close)
            stack.push(self._attachment)
            self._attachment.__enter__()
            segments = stack.enter_context(settled(self._device, self._cap_bytes))
            self._keeper.expand = segments.expand
            self._messages.say(segments.line)
            self._warns_if_full(lambda: self._device.reserve_host(self._engine.host.planned_bytes))
            stack.callback(self._meter.step_is_over)
            stack.callback(self._step_arena.close)
            self._chunked = self._keeper.state = SteppedInChunks(self._attachment, self._optimizers, self._messages)
            stack.callback(self._chunked.close)
            self._collect()
            self._engine.audit.compares_unplanned = self._on_audit is not OnAudit.OFF
            self._device.start_peaks()
            stack.callback(self._engine.end)  # first, then everything is removed from model and torch
            self._attachment.leave = self._leave
        except BaseException as error:
            stack.close()
            if not self._goes_on_without(error):
                raise
        return self

    def _collect(self) -> None:
        """Unreachable tensors must not count. Before another plan is made they are collected if they matter."""
        if self._is_metered and (self._source.is_given or self._on_over_budget is not OverBudget.REPLAN):
            gc.collect()

    def _goes_on_without(self, error: BaseException) -> bool:
        """Whether the loop runs as without a session, because something of ours has failed as it began. The user hears
        of a wrong argument by an error.
        """
        guard = self._attachment.guard
        if guard is None or not isinstance(error, Exception) or is_about_arguments(error) or not guard.takes(error):
            return False
        self._attachment.state = "closed"
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attachment.state == "closed":  # it was ended after it had been left open, or has failed
            return
        guard = self._attachment.guard
        try:
            self._end(kind, error)
        except BaseException as failure:
            self._stack.close()  # what an interrupt has left
            self._attachment.__exit__()
            if guard is None or not guard.takes(failure):
                raise

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if self._attachment.has_failed:
            self._stack.close()
            self._engine.audit.ends()
            return
        try:
            if isinstance(error, torch.OutOfMemoryError):
                self._note_what_is_held(error)
            self._keeper.is_ending, self._keeper.is_on = True, kind is None
            self._meter.step_is_over()
            self._engine.end()
            self._engine.tell_end()
            self._memory = self._device.peaks()  # later memory is not the session's
        finally:
            self._stack.close()
            differing = self._engine.audit.ends()
        if kind is None:
            if differing:
                self._messages.warn(self._text_of(differing))
            self._take_rested()
            for complaint in self._totals.complaints(are_plans_given=self._source.is_given):
                self._messages.warn(complaint)

    def _note_what_is_held(self, error: BaseException) -> None:
        """Adds to the error how far the planned step had come, and which objects hold memory in it."""
        plan, segment = self._book.following, self._engine.segment
        if plan is None:
            return
        self._keeper.take_peak(segment, self._book.following)
        held = [one for one in held_beside(self._engine, segment, plan.plan) if one.name != SavedValue.__name__]
        where = described(self._meter.moment, plan.plan)
        text = out_of_memory_text(segment.report.peak_bytes, plan.plan, where, held)
        error.add_note("\n".join(part for part in (f"poochplan: {text}", self.explain_peak()) if part))

    def close(self) -> None:
        """Ends the session like the end of the ``with`` block. Idempotent."""
        if self._state in ("open", "away", "aside"):
            self.__exit__(None, None, None)

    def step(self, model: str | None = None) -> None:
        """Marks where a new step begins. After the first call, calls of a model begin none.

        Needed if a step calls the model again after everything that the first call saved is gone, or if a step begins
        while an earlier forward still waits for its backward. With several models, ``model`` names the one that the
        step belongs to: needed if its step calls another one first. Without a name it belongs to the model called
        first.
        """
        attached = self._attachment
        if attached.has_failed:
            return
        if self._state not in ("open", "aside"):
            raise UsageError(
                f"step(): expected an open session, found a {self._state} one; call it inside the with block"
            )
        if model is not None and model not in self._models:
            names = ", ".join(map(repr, self._models)) if "" not in self._models else "none, for there is one model"
            raise UsageError(f"step(): expected the name of a model of this session ({names}), found {model!r}")
        try:
            self._engine.cursor.is_announced = True
            if not (attached.begins_at_rest() if attached.is_resting else attached.rests()):
                self._engine.begin(model, announced=True)
        except BaseException as error:
            guard = attached.guard
            if guard is None or not guard.takes(error):
                raise

    def away(self) -> AbstractContextManager[None]:
        """Steps inside run in-core, as if there were no session, for comparison with planned steps in the same process.

        Use it between steps, on the level of the ``with`` block: inside other saved-tensors hooks it removes those.
        """
        return self._attachment.away()

    def wait_until_planned(self, timeout_s: float | None = None) -> bool:
        """Waits, between two steps, until no plan is being made; returns whether each profiled kind of step has a plan.

        Returns False while steps are still being profiled: profiling needs further steps.
        """
        if self._attachment.has_failed:
            return False
        try:
            if self._state == "open":
                self._attachment.settle()
            return self._source.wait(timeout_s)
        except Exception as error:
            guard = self._attachment.guard
            if guard is None or not guard.takes(error):
                raise
            return False

    # -- for users --------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The model; with several, one module that contains them all."""
        return self._attachment.whole

    @property
    def plan(self) -> Plan | None:
        """The plan that the current step follows or has diverged from; otherwise that of the last step; otherwise the
        first active plan. None while there is none.
        """
        latest = self._book.latest
        return None if latest is None else latest.plan

    @property
    def plans(self) -> Mapping[Hashable, Plan]:
        """All active plans, by kind of step. The key is the name of the model, and its inputs if there are plans for
        several; with ``auto`` everything that distinguishes kinds.
        """
        return MappingProxyType({kind: one.plan for kind, one in self._book.active.items()})

    @property
    def profile(self) -> Profile | None:
        """The profile of :attr:`plan`; before there is a plan, the first profile. None before anything is profiled, and
        if plans were given without their profiles.
        """
        latest, profiles = self._book.latest, self._book.profiles
        return profiles.get(latest.kind) if latest is not None else next(iter(profiles.values()), None)

    @property
    def profiles(self) -> Mapping[Hashable, Profile]:
        """All known profiles, by kind of step, with the keys of :attr:`plans`."""
        return self._book.profiles

    @property
    def last(self) -> StepReport:
        """The current step, or the last one."""
        if not self._attachment.has_begun:
            return StepReport()
        if self._attachment.watch is not None:
            return self._attachment.watch.last
        segment = self._engine.segment
        self._keeper.take_peak(segment, self._book.following)
        return segment.report

    @property
    def total(self) -> StepReport:
        """The sum of all steps that were followed by another one; at the end of the session, of all steps."""
        self._take_rested()
        return self._totals.total

    @property
    def arena(self) -> ArenaReport | None:
        """The arena's part in the last step that could use it; None before. ``total`` has the bytes of all steps."""
        return self._step_arena.report()

    def report(self) -> Report:
        """A report of the steps so far, the running one included. A step ends when the next one begins or, once
        backward has used one of its values, with the optimizer's step.
        """
        if self._state == "new":
            raise UsageError(
                f"report(): expected a session that has been entered; use `with {self._opened_by} as session`"
            )
        if not self._attachment.has_begun:  # it has failed before
            return self._totals.report(Segment(0, 0), None, self.plan, None, self.arena)
        self._take_rested()
        self._engine.mechanism.take_times()
        segment = self._engine.segment
        self._keeper.take_peak(segment, self._book.following)
        memory = self._device.peaks() if self._state == "open" else self._memory
        plan = self._book.following.plan if self._book.following is not None else None
        return self._totals.report(segment, plan, self.plan, memory, self.arena, self._keeper.expand)

    def explain_peak(self) -> str:
        """Where the step's peak is and what holds it, as text; empty if :attr:`profile` is None.

        It describes the planned step, or before the in-core one, with the largest peak of the metered steps.
        """
        profile, planner = self.profile, self._planner
        return "" if profile is None or planner is None else planner.explain(profile, self.plan, self.total.peak_bytes)

    # -- for this package ---------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        """The engine that carries out plans; it exists from the beginning of the block on."""
        return self._attachment.engine

    @property
    def _device(self) -> ComputeDevice:
        return self._attachment.device

    @property
    def _state(self) -> str:
        return self._attachment.state

    @property
    def _opened_by(self) -> str:
        return "apply(plan, model)" if self._source.is_given else "auto(model, budget=...)"

    def _lasts_while(self, is_wanted: Callable[[], bool]) -> None:
        """The session ends, at the latest, when training happens and ``is_wanted()`` returns false.

        It is for callers that do not learn how a call ends: the callback of a trainer whose ``train`` may raise.
        """
        self._attachment.is_wanted = is_wanted
        self._attachment.abandoned = weakly(self, Session.close)

    def _warns_if_full(self, reserve: Callable[[], None]) -> None:
        try:
            reserve()
        except OSError as error:
            self._messages.warn(HOST_IS_FULL.format(format_bytes(self._engine.host.planned_bytes), error.strerror))

    # -- called by the attachment --------------------------------------------------------------------------------

    def _chosen(self, segment: Segment) -> None:
        self._take_rested()
        self._attachment.watch = None
        self._chunked.step_begins()
        plan = self._book.following
        self._engine.audit.step_ends()
        if plan is None or self._engine.follows is None:
            self._step_arena.stands_aside()
            self._meter.uses_arena(0)
        self._observer.begins(segment)
        self._keeper.limit_bytes = self._source.limit_bytes if plan is None and self._is_metered else 0
        if plan is None:
            self._keeper.begins_without_plan(self._engine, self._device)
            return
        if self._book.followed.get(plan.kind) is not plan:
            self._begins(plan)
        if self._on_audit is not OnAudit.OFF and self._engine.follows is not None:
            self._audit(plan)
        if self._is_metered:
            self._meter.uses_arena(self._step_arena.held_for(plan.plan))
            memory = plan.plan.prediction.memory
            is_due = plan.is_due or self._engine.audit.keeps_all
            self._meter.step_begins(self._engine, self._device, is_due=is_due, memory=memory)
        plan.begins()
        if self._source.is_given:
            self._check_gradients(segment, plan.plan)

    def _audit(self, plan: ActivePlan) -> None:
        """Has values of the step that begins compared. What stays displaces others, in arena and segments."""
        room_bytes = 0 if self._step_arena.is_possible or plan.plan.on == "reserved" else plan.room_bytes
        scratch_bytes = plan.room_bytes if self._is_metered else plan.free_bytes
        self._engine.audit.step_begins(plan.audited, room_bytes, scratch_bytes, plan.plan.prediction.step_s)
        if self._engine.audit.keeps_all:
            self._step_arena.stands_aside()

    def _tell_differences(self, segment: Segment) -> None:
        """Values that did not come back as they were are told, and kept from now on."""
        audit, plan = self._engine.audit, self._book.following
        segment.report.audited_values = audit.compared
        found, audit.differing = audit.differing, []
        if not found:
            return
        segment.report.audit_differences += len(found)
        for one in found:
            audit.keep(one)
        text = self._text_of(found)
        names = [one.planned.name for one in found if one.planned is not None]
        kept = KEPT_FROM_NOW_ON if plan is None or not names else self._source.keep(plan, names)
        self._messages.warn(f"{text}; {kept}")

    def _text_of(self, differing: list[Comparison]) -> str:
        """Raises ``AuditError`` where that is wanted."""
        text = differences_text(differing)
        if self._on_audit is OnAudit.ERROR:
            raise AuditError(text)
        return text

    def _begins(self, plan: ActivePlan) -> None:
        """The first step under the plan begins. The plan replaces the one that its kind has followed before."""
        if not self._book.followed:
            self._collect()  # an earlier session, if this one's name was still its own as the block was entered
        before = self._book.followed.get(plan.kind)
        self._book.followed[plan.kind] = plan
        self._device.let_go_of_cache()  # of steps that were planned otherwise, or not at all
        if before is not None:
            plan.audited.takes_over(before.audited)
            self._step_arena.forget(before.plan)
        if reason := self._step_arena.why_not(plan.plan):
            self._messages.warn(f"{FROM_TORCH}, and not from one arena: {reason}")
        self._warns_if_full(lambda: self._engine.make_room([plan.plan.instructions]))
        self._chunked.follow(self._engine.segment.model or next(iter(self._models)), plan.plan.state)

    def _check_gradients(self, segment: Segment, plan: Plan) -> None:
        live_bytes = segment.gradient_bytes
        if self._gradients_checked or not live_bytes or plan.gradients_live_through_forward:
            return
        self._gradients_checked = True
        self._messages.warn(
            f"gradients of an earlier step ({format_bytes(live_bytes)}) are still there in forward, the plan was made "
            "without; call optimizer.zero_grad(set_to_none=True) before the step, or profile with accumulate=True"
        )

    def _point(self, passed: int) -> None:
        self._meter.point()
        if passed > 1:
            self._step_arena.at(passed)
        elif (plan := self._book.following) and self._engine.follows is not None and not self._engine.audit.keeps_all:
            self._step_arena.begin(plan.plan, self._engine.segment)
            self._meter.uses_arena(self._step_arena.arena_bytes)

    def _optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        self._observer.optimizing(optimizer)
        self._chunked.begins(optimizer)
        if complaint := self._totals.optimizing(self._engine.segment):
            self._messages.warn(complaint)
        self._step_arena.optimizer_steps(optimizer)

    def _resting(self) -> None:
        self._step_arena.rests()
        self._meter.uses_arena(self._step_arena.arena_bytes)

    def _rests(self, most: MostBytes) -> None:
        self._book.following = None
        self._take_rested()
        self._attachment.watch = Watch(self._meter, self._engine, self._device, most)

    def _outgrown(self) -> None:
        self._attachment.wakes_next()
        if text := self._source.wakes(self.last.peak_bytes or 0):
            self._messages.warn(text)

    def _take_rested(self) -> None:
        """Counts the steps since the last time in which the session has rested."""
        if self._attachment.watch is not None:
            self._totals.rested(self._attachment.watch.take())

    def _step_is_over(self, segment: Segment) -> None:
        self._step_arena.step_is_over()
        self._meter.step_is_over()
        self._keeper.take_peak(segment, self._book.following)
        self._keeper.look(segment, self._book.following, self._engine)
        self._tell_differences(segment)

    def _ended(self, segment: Segment) -> None:
        self._meter.step_is_over()
        if not self._totals.is_new(segment):
            return
        self._keeper.take_peak(segment, self._book.following)
        plan = self._book.following
        self._totals.count(segment, plan.plan if plan is not None else None)
        self._observer.ended(segment)
        self._source.ended(segment)
        if plan is not None and (more_bytes := self._step_arena.lacks(plan.plan)):
            self._source.lacks_arena(plan, more_bytes)
        if plan is not None and self._keeper.is_on:
            self._keeper.look(segment, self._book.following, self._engine)
            peak_bytes, audit = self._meter.blocks_peak_bytes, self._engine.audit
            peak_bytes = None if peak_bytes is None or audit.keeps_all else peak_bytes - audit.beside_bytes
            plan.ended(peak_bytes, has_gradients=bool(segment.gradient_bytes))
