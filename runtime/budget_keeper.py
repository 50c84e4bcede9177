"""BudgetKeeper: what a session does about steps that take more than their budgets."""

from __future__ import annotations

from poochplan.errors import BudgetExceededError
from poochplan.formats.profile_parts import rounded_up
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.messages import Messages
from poochplan.runtime.metering.census import EVERY
from poochplan.runtime.metering.holders import held_beside
from poochplan.runtime.metering.step_meter import StepMeter, described
from poochplan.units import format_bytes

from .active_plan import REMEDY, ActivePlan, OverBudget, over_budget_text
from .arena.step_arena import StepArena
from .optimizer_state.steps import SteppedInChunks
from .plan_source import PlanSource

FROM_TORCH = "planned steps take their memory from torch's allocator"
FROM_SMALLER = "planned steps take their memory from a smaller arena"
LEFT_ABOVE = (
    "a step that has left its plan took {}, more than the budget of {}, as others like it may; this is told once"
)
RESERVED_ABOVE = (
    "the allocator took {} of the GPU's memory in a step that follows the plan, more than the budget of {} (predicted: "
    "{}; in use at once: {})"
)
EMPTIED = (
    "the GPU had no room in a step that follows the plan: its allocator emptied its cache and tried again ({} "
    "reserved, {} predicted), which delays the step"
)
PLAN_AGAIN = 'name a smaller budget, or have it planned again: apply(on_over_budget="replan", profile=profile)'
MORE_ROOM = 20 << 20
"""Bytes of which a plan has fewer after a retry of the allocator, if it has reserved all that was predicted: a page."""
WITHOUT_PLAN_ABOVE = (
    "a step without a plan took {}, more than the budget of {}: what it holds beside the values that can be swapped is "
    "too much; this is told once"
)
COMPARED_ABOVE = (
    "the step after that difference kept every value beside to find all that is wrong, and took {}, more than the "
    "budget of {}; this is told once"
)
PROFILED = (
    "a profiler of yours runs in steps whose memory is to be metered, so a step above the budget is not told; with a "
    "C++ compiler it is (pooch doctor says what to install), or leave some steps unprofiled"
)
MOST_UNKNOWN = 3
"""So many steps in a row without a peak are told."""


class BudgetKeeper:
    """Compares the peak of each step with its budget: gives up the arena, asks for another plan, warns or raises.

    State: what was told, and the limit of the open segment if that follows no plan.
    """

    def __init__(
        self,
        source: PlanSource,
        meter: StepMeter,
        step_arena: StepArena,
        messages: Messages,
        on_over_budget: OverBudget,
    ) -> None:
        self._source, self._meter, self._step_arena = source, meter, step_arena
        self._messages, self._on_over_budget = messages, on_over_budget
        self.is_on, self.is_ending = True, False
        """Whether it reacts; and whether no later step can tell."""
        self._told = set[str]()
        """Messages that come once."""
        self.limit_bytes = self._limited = 0
        """Of the open segment if it follows no plan, and how many such segments there were."""
        self.expand: bool | None = None
        """Whether the allocator's segments expand; None if what it reserves is not predicted."""
        self.state: SteppedInChunks | None = None
        """While it is waiting for an optimizer, whose state is still there, planned steps are not judged."""
        self._is_limit_due = True
        """Whether the next of them begins with a census."""

    def begins_without_plan(self, engine: Engine, device: ComputeDevice) -> None:
        """A segment begins that follows no plan. It is metered if it has a limit."""
        if not self.limit_bytes:
            return
        is_due = self._is_limit_due or self._limited % EVERY == 0
        self._limited += 1
        self._is_limit_due = False
        self._meter.step_begins(engine, device, is_due=is_due)

    def take_peak(self, segment: Segment, plan: ActivePlan | None) -> None:
        """The peak so far of a segment that follows the plan, or has a limit."""
        is_metered = plan is not None or self.limit_bytes
        peak_bytes = self._meter.peak_bytes if is_metered else None
        if peak_bytes is not None:
            segment.report.peak_bytes = peak_bytes
            segment.report.reserved_bytes = self._meter.reserved_bytes

    def look(self, segment: Segment, plan: ActivePlan | None, engine: Engine) -> None:
        """Reacts to a step above its budget. Of one that has left its plan it is only said, once."""
        peak_bytes = segment.report.peak_bytes
        if self._meter.unknown >= MOST_UNKNOWN and PROFILED not in self._told:
            self._told.add(PROFILED)
            self._messages.warn(PROFILED)
        if self.is_on and self.limit_bytes and peak_bytes is not None and peak_bytes > self.limit_bytes:
            self._is_limit_due = not self._meter.is_certain
            self._tell_above(WITHOUT_PLAN_ABOVE, peak_bytes, self.limit_bytes)
        elif self.is_on and self.limit_bytes and self._source.limits_reserved:
            reserved_bytes = segment.report.reserved_bytes or 0
            if reserved_bytes > self.limit_bytes:
                self._tell_above(WITHOUT_PLAN_ABOVE, reserved_bytes, self.limit_bytes)
        is_waiting = self.state is not None and self.state.is_waiting
        if not self.is_on or plan is None or peak_bytes is None or is_waiting:
            return
        if not plan.is_over(peak_bytes):
            if not (engine.audit.keeps_all or segment.diverged):
                self._look_at_allocator(plan, segment, peak_bytes)
            return
        if engine.audit.keeps_all or segment.diverged:
            text = LEFT_ABOVE if segment.diverged else COMPARED_ABOVE
            self._tell_above(text, peak_bytes, plan.plan.budget_bytes, is_last=segment.diverged)
            return
        within = (self._meter.blocks_peak_bytes or peak_bytes) <= plan.plan.budget_bytes  # without the arena's holes
        if self._step_arena.may_give_up and within:
            is_smaller = self._step_arena.exceeded(plan.plan, peak_bytes - plan.plan.budget_bytes)
            if is_smaller is not None:
                now = FROM_SMALLER if is_smaller else FROM_TORCH
                text = self._above(plan, segment, peak_bytes, engine)
                self._messages.warn(f"{text}; {now} from now on, within the budget")
        elif not self._meter.is_certain and not self.is_ending:  # at the end no later step can tell
            plan.check_next()
        else:
            self._is_above(plan, segment, peak_bytes, engine)

    def _look_at_allocator(self, plan: ActivePlan, segment: Segment, peak_bytes: int) -> None:
        """Reacts to a step within its budget for which the allocator took more from the GPU, or found no room there."""
        reserved_bytes, retries = segment.report.reserved_bytes or 0, self._meter.retries
        promised_bytes = plan.plan.prediction.reserved_with(self.expand)
        promised = "not known" if promised_bytes is None else format_bytes(promised_bytes)
        more_bytes = plan.reserved_above(reserved_bytes, self.expand)
        if more_bytes:
            text = RESERVED_ABOVE.format(
                format_bytes(reserved_bytes), format_bytes(plan.plan.budget_bytes), promised, format_bytes(peak_bytes)
            )
        elif retries and not plan.is_told:
            text = EMPTIED.format(format_bytes(reserved_bytes), promised)
            more_bytes = max(MORE_ROOM, (promised_bytes or 0) - reserved_bytes)
        else:
            return
        is_error = bool(plan.reserved_above(reserved_bytes, self.expand))  # a step that was only delayed is none
        now = self._what_now(plan, text, more_bytes, reserved_bytes, PLAN_AGAIN, is_error=is_error)
        self._messages.warn(f"{text}; {now}")

    def _tell_above(self, text: str, peak_bytes: int, budget_bytes: int, *, is_last: bool = False) -> None:
        """A step took more than its budget, for which no other plan is made: that is told once. ``is_last``: also if
        the meter is not certain, because no step like it may come again, or its plan goes.
        """
        if text not in self._told and (self._meter.is_certain or is_last):
            self._told.add(text)
            most = "" if self._meter.is_certain else "up to "
            self._messages.warn(text.format(f"{most}{format_bytes(peak_bytes)}", format_bytes(budget_bytes)))

    def _is_above(self, plan: ActivePlan, segment: Segment, peak_bytes: int, engine: Engine) -> None:
        """Reports the excess, raises, or requests another plan."""
        text = self._above(plan, segment, peak_bytes, engine)
        promised_bytes = plan.plan.prediction.peak_of_step(bool(segment.report.served_bytes))
        more_bytes = max(1, peak_bytes - promised_bytes)
        self._messages.warn(f"{text}; {self._what_now(plan, text, more_bytes, peak_bytes, REMEDY)}")

    def _what_now(
        self, plan: ActivePlan, text: str, more_bytes: int, peak_bytes: int, remedy: str, *, is_error: bool = True
    ) -> str:
        """What follows as the user wants it: another plan has room for ``more_bytes`` more, or an error is raised."""
        plan.has_exceeded = True
        if is_error and self._on_over_budget is OverBudget.ERROR:
            raise BudgetExceededError(f"{text}; {remedy}", peak_bytes=peak_bytes)
        plan.is_told = True
        if self._on_over_budget is not OverBudget.REPLAN:
            return remedy
        return self._source.plan_again(plan, rounded_up(more_bytes))

    def _above(self, plan: ActivePlan, segment: Segment, peak_bytes: int, engine: Engine) -> str:
        where, gaps_bytes = described(self._meter.moment, plan.plan), 0
        blocks_bytes = self._meter.blocks_peak_bytes or peak_bytes
        if blocks_bytes <= plan.plan.prediction.peak_bytes:  # nothing takes more than predicted
            gaps_bytes = peak_bytes - blocks_bytes
        held = [] if gaps_bytes else held_beside(engine, segment, plan.plan)
        return over_budget_text(peak_bytes, plan.plan, where, held, gaps_bytes)
