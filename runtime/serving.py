"""Serving: the blocks of the steps that follow a plan, from one arena in which an earlier step's blocks were laid out.

It begins at a segment's first save, where a step is told from what is none, and ends with the step: at the optimizer's
end, at a forward without gradients, where the plan is left. The order of what a step takes is found again at each point
of the runtime's clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from poochplan.errors import AllocatorError, UsageError
from poochplan.formats.plan import OUTSIDE, Layout, Place, Plan
from poochplan.runtime.allocator.allocation_log import AllocationLog
from poochplan.runtime.allocator.arena import Arena, Fates, Places
from poochplan.runtime.allocator.building import why_unavailable
from poochplan.runtime.allocator.observed import STEP_END, observed_blocks
from poochplan.runtime.metering.allocated import step_scope
from poochplan.tensors.malloc import give_back_freed

from .run_report import ArenaReport, Unserved

ArenaMode = Literal["auto", "on", "off"]
_MOST_TOLD = 8
_MOST_LESSONS = 3
"""So many times what a step has taken is laid out anew."""


class Pack(Protocol):
    """Finds places; the runtime does not know how."""

    def __call__(self, blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes; if it can be, no more
        than ``room_bytes``.
        """


@dataclass
class Lesson:
    """What is known of a plan's steps."""

    plan: Plan
    layout: Layout | None = None
    """As a step was; None until there is one, and where its arena would be too large."""
    times: int = 0
    """So often it has been laid out anew."""
    larger_bytes: int = 0
    """How much the arena of the last step that was looked at would be above what there is room for."""

    @property
    def is_over(self) -> bool:
        return self.times >= _MOST_LESSONS


class Serving:
    """State: what is known of each plan's steps; the arena of the plan that was followed last; whether the step that
    runs is one that follows it; and, until a step is served without a miss, the log of the step that runs or ran last.

    The plan's layout is a promise, of how large the arena is at most. What is served is laid out by a step as it was:
    autograd adds gradients up in place where no dispatch mode looks on, as one did when the step was profiled. Until
    there is such a step, and where its arena would be larger than the budget has room for, nothing is served. Nor is
    it where steps go on to differ from those they were laid out by, as those of other sizes do that a larger plan is
    followed for.

    One arena at a time: that of another plan takes its place, and goes with the last tensor in it.

    ``pack`` lays out what a step has taken.
    """

    _logging: ClassVar[weakref.ref[Serving] | None] = None
    """Who writes a log: one at a time in a process, and the next step of another is as good."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._lessons: dict[int, Lesson] = {}
        """By the identity of the plan that they hold."""
        self._lesson: Lesson | None = None
        """Of the plan that was followed last."""
        self._arena: Arena | None = None
        self._is_on = False
        self._is_whole = False
        """Whether the step goes on to its end as it began."""
        self._point = 0
        self._log: AllocationLog | None = None
        self._state_entries: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Of each optimizer before its last step."""

    def begin(self, plan: Plan, *, is_observed: bool) -> None:
        """A segment that follows ``plan`` has passed the first point of the clock; ``is_observed``: by dispatch modes,
        so that what it takes is no example, and has no arena.
        """
        self._learn()
        if plan.layout is None:
            return
        self._follow(self._lessons.setdefault(id(plan), Lesson(plan)))
        assert self._lesson is not None
        if is_observed:
            self._close_arena()  # what it takes lies outside in part: beside an arena that would be too much
        elif self._arena is None and self._lesson.layout is not None:
            self._arena = _arena(self._lesson.layout)
        self._is_on = self._is_whole = True
        self._point = 1
        if self._arena is not None:
            self._arena.begin(1)
        if not is_observed and not self._lesson.is_over:
            self._write_down()

    def _follow(self, lesson: Lesson) -> None:
        if lesson is self._lesson:
            return
        self._close_arena()
        self._lesson = lesson
        if lesson.layout is not None:
            self._arena = _arena(lesson.layout)

    def _write_down(self) -> None:
        scope, other = step_scope(), Serving._logging() if Serving._logging is not None else None
        if scope is None or (other is not None and other is not self and other._log is not None):
            return
        Serving._logging = weakref.ref(self)
        scope.join()
        self._log = AllocationLog(scope)
        self._log.__enter__()
        self._log.mark(1)

    def at(self, point: int) -> None:
        """The segment has passed so many points."""
        if self._is_on:
            self._point = point
            if self._arena is not None:
                self._arena.at(point)
            if self._log is not None:
                self._log.mark(point)

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
        if self._arena is not None:
            self._arena.end()
        if self._log is not None:
            self._log.mark(STEP_END)

    def close(self) -> None:
        """Nothing is served any more; what lies in the arena stays as it is."""
        self.step_is_over()
        if self._log is not None:
            self._log.__exit__(None, None, None)
            self._log = None
        if self._arena is not None:
            self._arena.close()

    def _learn(self) -> None:
        """From the step before, which has ended by now; where it was not served as planned it is laid out anew."""
        log, self._log = self._log, None
        if log is not None:
            log.__exit__(None, None, None)
        lesson = self._lesson
        if lesson is None or not self._is_whole or self._point < len(lesson.plan.values) + len(lesson.plan.uses):
            return  # it has not come to its end, as a forward whose loss nobody wanted
        if log is not None:
            self._learn_from(log, lesson)
        elif lesson.is_over and self._arena is not None and _is_misfit(self._arena.counts().step):
            self._close_arena()
            lesson.layout = None

    def _learn_from(self, log: AllocationLog, lesson: Lesson) -> None:
        if self._arena is not None and not _misses(self._arena.counts().step):
            lesson.times = _MOST_LESSONS
            return
        lesson.times += 1
        assert lesson.plan.layout is not None
        least_bytes = lesson.plan.layout.least_bytes
        observed = observed_blocks(log.events, least_bytes)
        inside = [block for block in observed if block.end]
        room_bytes = _room_bytes(lesson.plan)
        spans = [(block.start, block.end, block.size_bytes) for block in inside]
        offsets, arena_bytes = self._pack(spans, room_bytes)
        found = iter(offsets)
        places = tuple(
            Place(block.point, block.size_bytes, next(found) if block.end else OUTSIDE) for block in observed
        )
        self._close_arena()
        lesson.layout = None
        lesson.larger_bytes = max(0, arena_bytes - room_bytes)
        if not lesson.larger_bytes:
            lesson.layout = Layout(arena_bytes=arena_bytes, least_bytes=least_bytes, places=places)
            self._arena = _arena(lesson.layout)
            give_back_freed()  # what the steps before have left is not used again

    @property
    def arena_bytes(self) -> int:
        """Of the arena that there is; 0 where there is none."""
        has_one = self._arena is not None and self._lesson is not None and self._lesson.layout is not None
        return self._lesson.layout.arena_bytes if has_one else 0  # type: ignore[union-attr]

    def report(self, plan: Plan) -> ArenaReport | None:
        """What became of the blocks so far; None where there is no arena yet."""
        lesson = self._lesson
        if lesson is None or lesson.layout is None or self._arena is None:
            return ArenaReport(larger_bytes=lesson.larger_bytes) if lesson is not None and lesson.larger_bytes else None
        counts = self._arena.counts()
        misses = [
            Unserved(size_bytes=miss.size_bytes, layer=_layer(plan, miss.point), why=miss.fate)
            for miss in self._arena.misses()[:_MOST_TOLD]
        ]
        return ArenaReport(
            size_bytes=lesson.layout.arena_bytes,
            served=counts.step.served.blocks,
            served_bytes=counts.step.served.size_bytes,
            unplanned=counts.step.unplanned.blocks,
            unplanned_bytes=counts.step.unplanned.size_bytes,
            taken=counts.step.taken.blocks,
            taken_bytes=counts.step.taken.size_bytes,
            unserved=misses,
        )

    def _close_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _arena(layout: Layout) -> Arena:
    table = np.array(layout.places, dtype=np.int64).reshape(-1, 3)
    places = Places(sizes_bytes=table[:, 1], offsets=table[:, 2], points=table[:, 0])
    return Arena(places, layout.arena_bytes, layout.least_bytes)


def _misses(fates: Fates) -> int:
    """Blocks that lay outside against the layout. What was expected and did not come does no harm: of micro-batches
    only the first takes gradients.
    """
    return fates.taken.blocks + fates.unplanned.blocks


def _is_misfit(fates: Fates) -> bool:
    return _misses(fates) > fates.served.blocks


def _room_bytes(plan: Plan) -> int:
    """For the arena: what was planned for it, and what the budget has beside."""
    found = plan.prediction
    if found.arena_bytes is None or found.arena_peak_bytes is None:
        return 0
    return found.arena_bytes + max(0, plan.budget_bytes - found.arena_peak_bytes)


def serving_for(mode: ArenaMode, device: str, plans: list[Plan], pack: Pack | None) -> Serving | None:
    """What serves the steps of these plans; None where they are to go to the ordinary allocator.

    Raises ``UsageError`` where the mode is ``"on"`` and there can be no arena.
    """
    reason = why_not_served(mode, device, plans)
    if not reason and pack is not None:
        return Serving(pack)
    if mode == "on":
        raise UsageError(f'arena: expected "on" to be possible, found {reason}')
    return None


def why_not_served(mode: ArenaMode, device: str, plans: Sequence[Plan]) -> str:
    """What is found in place of steps that can be served, in one line; empty where they can."""
    if mode == "off":
        return "off"
    if device != "cpu":
        return f"a plan for {device}, whose allocator takes no arena; leave it to that"
    if all(plan.layout is None for plan in plans):
        return "a plan without a layout; plan again"
    if mode == "auto" and not all(plan.holds_arena for plan in plans if plan.layout is not None):
        return "a plan whose arena is larger than its budget"
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
