"""Serving: allocates the blocks of steps that follow a plan from one arena, by the recorded layout of an earlier step.

It begins at a segment's first save, because only there a step can be recognised. It ends with the step: after the
optimizer's step, at a forward without gradients, or where the step leaves the plan. At each point of the runtime's
clock the order of the step's blocks is matched again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from poochplan.errors import AllocatorError, UsageError
from poochplan.formats.plan import Plan
from poochplan.runtime.arena.known_steps import Kind, KnownStep, KnownSteps
from poochplan.runtime.arena.library import why_unavailable
from poochplan.runtime.arena.recorded_layout import Pack, ServedRuns
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.metering.allocated import step_scope

from ..run_report import ArenaReport, StepReport, arena_report

ArenaMode = Literal["auto", "on", "off"]
NO_LAYOUT = "a plan without a layout; plan again"


class Serving:
    """State: the knowledge about each kind of step, the steps that are served, and whether the running step follows a
    plan.

    The plan's layout bounds the size of the arena. Steps are served by the recorded layout of a step of the same kind.
    Nothing is served in three cases: no such step was recorded yet; its arena would exceed the room that the budget
    leaves; or steps keep differing from their recorded layout.

    Parameters
    ----------
    pack: computes the layout of the blocks of a step.
    mode: as for :func:`poochplan.apply`.
    """

    def __init__(self, pack: Pack, mode: ArenaMode) -> None:
        self._pack, self._mode = pack, mode
        self._given_up: list[Plan] = []
        """Plans whose steps are no longer served."""
        self._kinds = KnownSteps()
        self._known: KnownStep | None = None
        """The knowledge about the step that began last."""
        self._has_begun = False
        """Whether a step has been served or logged. Before that there is no memory to give back."""
        self._report: StepReport | None = None
        self._is_on = False
        self._is_whole = False
        """Whether the step is a complete example of its kind."""
        self._point = 0
        self._state_entries: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Number of state entries of each optimizer before its last step."""

    @functools.cached_property
    def _runs(self) -> ServedRuns:
        """Made when the first step is to be served: by then the allocator is built."""
        return ServedRuns(step_scope())

    def begin(self, plan: Plan, segment: Segment) -> None:
        """A segment that follows ``plan`` has passed the first point of the clock."""
        self._has_begun = True
        self.learn()
        kind = Kind(bool(segment.gradient_bytes), segment.inputs)
        self._known = known = self._kinds.begin(plan, kind) if self.serves(plan) else None
        if known is None:
            self._runs.stands_aside()
            return
        self._is_on = self._is_whole = True
        self._report, self._point = segment.report, 1
        self._runs.begin(
            known.layout,
            largest_bytes=self._kinds.largest_bytes,
            room_bytes=known.room_bytes,
            log=known.wants_log,
            point=1,
        )

    def serves(self, plan: Plan) -> bool:
        """Whether steps that follow the plan are to be served."""
        fits = self._mode == "on" or plan.holds_arena
        return plan.layout is not None and fits and all(plan is not one for one in self._given_up)

    def held_for(self, plan: Plan) -> int:
        """Bytes of the arena that is there as a step of the plan begins; 0 if it is of another plan, since it goes."""
        return self.arena_bytes if self._known is not None and self._known.plan is plan else 0

    def why_not(self, plan: Plan) -> str:
        """Why steps that follow the plan are not served although an arena was requested; else empty."""
        return NO_LAYOUT if self._mode == "on" and plan.layout is None else ""

    @property
    def may_give_up(self) -> bool:
        """Whether the arena may be given up, because the user did not request it explicitly."""
        return self._mode == "auto"

    def exceeded(self, plan: Plan, over_bytes: int) -> bool | None:
        """A served step exceeded its budget by ``over_bytes``. The next steps get a smaller arena, or none if it cannot
        be so small. Returns whether there is one, and None if this has been done, as a step is looked at twice.
        """
        known = self._known
        if not self.serves(plan) or known is None or known.plan is not plan or known.layout is None:
            return None
        if known.shrinks(over_bytes):
            self._runs.laid.rests()
            return True
        self._given_up.append(plan)
        self.forget(plan)
        return False

    def at(self, point: int) -> None:
        """The segment has passed ``point`` points."""
        if self._is_on:
            self._point = point
            self._runs.at(point)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. State that it creates must not lie in the arena, so its step is served only
        once it creates no more state.
        """
        entries = sum(map(len, optimizer.state.values()))
        if self._state_entries.get(optimizer) != entries:
            self._state_entries[optimizer] = entries
            self._is_whole = False
            self.step_is_over()

    def departed(self) -> None:
        """The segment has left its plan or has raised, or the code that runs now is not part of its step."""
        self._is_whole = False
        self.step_is_over()

    def step_is_over(self) -> None:
        """Allocations from here on do not belong to the step. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        fates = self._runs.end()
        if self._report is not None and fates is not None:
            self._report.served_bytes += fates.served.size_bytes
            self._report.unserved_bytes += fates.unplanned.size_bytes + fates.taken.size_bytes
        self._report = None

    def rests(self) -> None:
        """Other code runs between two steps. Until the next step the machine gets the arena's memory back, except for
        live blocks. Does nothing within a step.
        """
        if self._has_begun and not self._is_on:
            self._runs.laid.rests()

    def stands_aside(self) -> None:
        """A segment begins that is not served. The machine gets the arena's memory back for it, except for live
        blocks.
        """
        if self._has_begun:
            self.learn()
            self._runs.stands_aside()

    def close(self) -> None:
        """Nothing is served any more; blocks in the arena stay."""
        self.step_is_over()
        self._is_whole = False
        if self._has_begun:
            self._runs.close()

    def forget(self, plan: Plan) -> None:
        """Steps of the plan are no longer followed."""
        if self._known is not None and self._known.plan is plan:
            self.step_is_over()
            self._runs.events()
            self._runs.laid.rests()
            self._known = None
        self._kinds.forget(plan)

    def learn(self) -> None:
        """Learns from the previous step, which has ended by now. If its blocks did not match the layout, it is laid out
        again.
        """
        self.step_is_over()
        fates, events = self._runs.fates, self._runs.events()
        known, is_whole = self._known, self._is_whole
        self._is_whole = False  # no step is learned from twice
        if known is None or not is_whole or self._point < len(known.plan.values) + len(known.plan.uses):
            return  # the step has not ended, for example a forward whose loss was not used
        if events is not None:
            if known.saw(events, fates, self._pack) and fates is not None and fates.taken.blocks:
                self._runs.laid.leave()  # blocks with separate places may be there to stay
        elif fates is not None:
            known.served(fates)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena that serves the step that began last; 0 if none does."""
        return self._runs.laid.held_bytes if self._has_begun else 0

    def report(self) -> ArenaReport | None:
        """A report on the blocks of the last step that could be served; None if there were no places for them."""
        known, arena = self._known, self._runs.laid.arena if self._has_begun else None
        if known is None or known.layout is None or arena is None or not self._runs.is_served:
            return ArenaReport(larger_bytes=known.larger_bytes) if known is not None and known.larger_bytes else None
        return arena_report(arena, known.layout.arena_bytes, functools.partial(_layer, known.plan))


def serving_for(mode: ArenaMode, device: str, pack: Pack | None, plans: Sequence[Plan] = ()) -> Serving | None:
    """The Serving for the steps of these plans, or of plans to come; None if they use the ordinary allocator.

    Raises ``UsageError`` if the mode is ``"on"`` and an arena is impossible.
    """
    reason = why_not_served(mode, device, plans)
    if not reason and pack is not None:
        return Serving(pack, mode)
    if mode == "on":
        raise UsageError(f'arena: expected "on" to be possible, found {reason}')
    return None


def why_not_served(mode: ArenaMode, device: str, plans: Sequence[Plan]) -> str:
    """One line that says why steps cannot be served; empty if they can."""
    if mode == "off":
        return "off"
    if device != "cpu":
        return why_no_arena(device)
    if plans and all(plan.layout is None for plan in plans):
        return NO_LAYOUT
    if mode == "auto" and not all(plan.holds_arena for plan in plans if plan.layout is not None):
        return "a plan whose arena is larger than its budget"
    return why_no_arena(device)


def why_no_arena(device: str) -> str:
    """One line that says why the device takes no arena; empty if it does."""
    if device != "cpu":
        return f"a plan for {device}, whose allocator takes no arena; leave it to that"
    try:
        return why_unavailable()
    except AllocatorError as error:
        return str(error)


def _layer(plan: Plan, point: int) -> str:
    """The layer that saves or uses a value at the last point."""
    saves = len(plan.values)
    if 0 < point <= saves:
        return plan.values[point - 1].layer
    if saves < point <= saves + len(plan.uses):
        return plan.values[plan.handles[plan.uses[point - saves - 1]]].layer
    return ""
