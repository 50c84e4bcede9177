"""Serving: the blocks of the steps that follow a plan, from one arena in which an earlier step's blocks were laid out.

It begins at a segment's first save, where a step is told from what is none, and ends with the step: at the optimizer's
end, at a forward without gradients, where the plan is left. The order of what a step takes is found again at each point
of the runtime's clock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from poochplan.errors import AllocatorError, UsageError
from poochplan.formats.plan import Plan
from poochplan.runtime.allocator.library import why_unavailable
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.known_steps import Kind, KnownStep, KnownSteps
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.served_runs import Pack, ServedRuns

from .run_report import ArenaReport, StepReport, arena_report

ArenaMode = Literal["auto", "on", "off"]
NO_LAYOUT = "a plan without a layout; plan again"


class Serving:
    """State: what is known of each kind of step; the steps that are served; whether the one that runs follows a plan.

    The plan's layout is a promise, of how large the arena is at most. What is served is laid out by a step of the same
    kind as it was. Until there is such a step, and where its arena would be larger than the budget has room for,
    nothing is served. Nor is it where steps go on to differ from those they were laid out by.

    Parameters
    ----------
    pack: lays out what a step has taken.
    mode: as for :func:`poochplan.apply`.
    """

    def __init__(self, pack: Pack, mode: ArenaMode) -> None:
        self._pack, self._mode = pack, mode
        self._given_up: list[Plan] = []
        """Plans whose steps are not served any more."""
        self._kinds = KnownSteps()
        self._known: KnownStep | None = None
        """Of the step that began last."""
        self._has_begun = False
        """Whether a step has been served, or written down: there is nothing to give back before."""
        self._report: StepReport | None = None
        self._is_on = False
        self._is_whole = False
        """Whether the step is an example of its kind, and goes on to its end as it began."""
        self._point = 0
        self._state_entries: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Of each optimizer before its last step."""

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

    def why_not(self, plan: Plan) -> str:
        """Why steps that follow the plan are not served, though that was asked for; else empty."""
        return NO_LAYOUT if self._mode == "on" and plan.layout is None else ""

    @property
    def may_give_up(self) -> bool:
        """Whether nobody has asked for an arena in so many words."""
        return self._mode == "auto"

    def exceeded(self, plan: Plan, over_bytes: int) -> bool:
        """A step that was served took so much more than its budget: the next ones get a smaller arena, or none where
        it cannot be so small. Whether there is one.
        """
        known = self._known
        if known is not None and known.plan is plan and known.shrinks(over_bytes):
            return True
        self._given_up.append(plan)
        self.forget(plan)
        return False

    def at(self, point: int) -> None:
        """The segment has passed so many points."""
        if self._is_on:
            self._point = point
            self._runs.at(point)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to: what it makes to keep must not lie in the arena, so it is served once it makes no more."""
        entries = sum(map(len, optimizer.state.values()))
        if self._state_entries.get(optimizer) != entries:
            self._state_entries[optimizer] = entries
            self._is_whole = False
            self.step_is_over()

    def departed(self) -> None:
        """The segment has left its plan, or has raised, or what runs now is none of its step."""
        self._is_whole = False
        self.step_is_over()

    def step_is_over(self) -> None:
        """What is allocated from here on is not of the step. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        fates = self._runs.end()
        if self._report is not None and fates is not None:
            self._report.served_bytes += fates.served.size_bytes
            self._report.unserved_bytes += fates.unplanned.size_bytes + fates.taken.size_bytes
        self._report = None

    def rests(self) -> None:
        """Between steps something else runs: until the next one the machine has the arena's memory back, but for what
        lives. Amid a step nothing happens.
        """
        if self._has_begun and not self._is_on:
            self._runs.laid.rests()

    def stands_aside(self) -> None:
        """A segment begins that is not served: the machine has the arena's memory back for it, but for what lives."""
        if self._has_begun:
            self.learn()
            self._runs.stands_aside()

    def close(self) -> None:
        """Nothing is served any more; what lies in the arena stays as it is."""
        self.step_is_over()
        self._is_whole = False
        if self._has_begun:
            self._runs.close()

    def forget(self, plan: Plan) -> None:
        """Its steps are not followed any more."""
        if self._known is not None and self._known.plan is plan:
            self.step_is_over()
            self._runs.events()
            self._known = None
        self._kinds.forget(plan)

    def learn(self) -> None:
        """From the step before, which has ended by now; where it was not served as planned it is laid out anew."""
        self.step_is_over()
        fates, events = self._runs.fates, self._runs.events()
        known, is_whole = self._known, self._is_whole
        self._is_whole = False  # nothing is learned twice
        if known is None or not is_whole or self._point < len(known.plan.values) + len(known.plan.uses):
            return  # it has not come to its end, as a forward whose loss nobody wanted
        if events is not None:
            if known.saw(events, fates, self._pack) and fates is not None and fates.taken.blocks:
                self._runs.laid.leave()  # what lies in places of its own there may be there to stay
        elif fates is not None:
            known.served(fates)

    @property
    def arena_bytes(self) -> int:
        """Of the arena that the step which began last is served from; 0 where it is not."""
        return self._runs.laid.held_bytes if self._has_begun else 0

    def report(self) -> ArenaReport | None:
        """What became of the blocks of the last step that could be served; None where there were no places for them."""
        known, arena = self._known, self._runs.laid.arena if self._has_begun else None
        if known is None or known.layout is None or arena is None or not self._runs.is_served:
            return ArenaReport(larger_bytes=known.larger_bytes) if known is not None and known.larger_bytes else None
        return arena_report(arena, known.layout.arena_bytes, functools.partial(_layer, known.plan))


def serving_for(mode: ArenaMode, device: str, pack: Pack | None, plans: Sequence[Plan] = ()) -> Serving | None:
    """What serves the steps of these plans, or of those to come; None where they are to go to the ordinary allocator.

    Raises ``UsageError`` where the mode is ``"on"`` and there can be no arena.
    """
    reason = why_not_served(mode, device, plans)
    if not reason and pack is not None:
        return Serving(pack, mode)
    if mode == "on":
        raise UsageError(f'arena: expected "on" to be possible, found {reason}')
    return None


def why_not_served(mode: ArenaMode, device: str, plans: Sequence[Plan]) -> str:
    """What is found in place of steps that can be served, in one line; empty where they can."""
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
    """What is found in place of a device that takes an arena, in one line; empty where it does."""
    if device != "cpu":
        return f"a plan for {device}, whose allocator takes no arena; leave it to that"
    try:
        return why_unavailable()
    except AllocatorError as error:
        return str(error)


def _layer(plan: Plan, point: int) -> str:
    """The layer that saves or uses at the point which was passed last."""
    saves = len(plan.values)
    if 0 < point <= saves:
        return plan.values[point - 1].layer
    if saves < point <= saves + len(plan.uses):
        return plan.values[plan.handles[plan.uses[point - saves - 1]]].layer
    return ""
