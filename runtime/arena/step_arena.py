"""StepArena: allocates the blocks of steps that follow a plan from one arena, by the recorded layout of an earlier step
of their variant (KnownSteps).

It begins at a segment's first save, because only there a step can be recognised. It ends with the step: after the
optimizer's step, at a forward without gradients, or where the step leaves the plan. At each point of the runtime's
clock the order of the step's blocks is matched again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import OUTSIDE, Plan
from poochplan.formats.plan_set import Signature
from poochplan.runtime.arena.library import Table, untold_absence, why_not_loaded, why_unavailable
from poochplan.runtime.arena.recorded_layout import (
    ArenaRuns,
    PackBlocks,
    RecordedLayout,
    layout_of_run,
    recorded_blocks,
    recorded_layout,
)
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.messages import warn
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.metering.step_meter import layer_at

from ..run_report import ArenaReport, StepReport

ArenaMode = Literal["auto", "on", "off"]
NO_LAYOUT = "a plan without a layout; plan again"
MOST_LAID_OUT = 3
"""The steps of a variant are laid out at most this often."""
MOST_LOGGED = 50
"""At most this many steps of a variant are logged, some of which may have missed nothing."""
MOST_KNOWN = 64
"""Variants beyond this number are forgotten, the longest unused first."""


class StepVariant(NamedTuple):
    """Differences between steps of one plan that change which blocks they take."""

    has_gradients: bool
    """Whether gradients exist already: then autograd adds to them in place."""
    inputs: Signature | None
    """Inputs of the model; None if the session does not ask for them."""


@dataclass
class KnownStep:
    plan: Plan
    steps: int = 0
    """Number of steps that have begun."""
    layout: RecordedLayout | None = None
    """The recorded layout of one of them; None before there is one, and if its arena would be too large."""
    times: int = 0
    """Number of times that a step has been laid out."""
    logged: int = 0
    has_missed: bool = False
    """Whether a step had blocks outside that differ from the layout. Other steps that look the same at their beginning
    may have them again: of several micro-batches only the last has the optimizer."""
    is_settled: bool = False
    """Whether a logged step has missed nothing, and no step ever has."""
    larger_bytes: int = 0
    """Bytes by which the arena of the last examined step would exceed its room."""
    grown_bytes: int = 0
    """Bytes outside the arena in addition to the planned ones, found by a step that exceeded its budget with it."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is learned."""
        return self.times >= MOST_LAID_OUT or self.logged >= MOST_LOGGED

    @property
    def room_bytes(self) -> int:
        """Room for the arena: its planned bytes, and the rest of the budget."""
        found = self.plan.prediction
        if found.arena_bytes is None or found.arena_peak_bytes is None:
            return 0
        return found.arena_bytes + max(0, self.plan.budget_bytes - found.arena_peak_bytes) - self.grown_bytes

    def shrinks(self, over_bytes: int) -> bool:
        """A step exceeded its budget by ``over_bytes``: the arena gets smaller. False if it cannot be so small."""
        if self.layout is None or self.is_over or self.layout.arena_bytes - over_bytes < self.layout.live_bytes:
            return False
        self.grown_bytes += over_bytes + max(0, self.room_bytes - self.layout.arena_bytes)
        self.layout, self.is_settled = None, False
        return True

    def saw(self, events: Table, fates: ArenaReport | None, pack: PackBlocks) -> bool:
        """A whole step was logged, with ``fates`` if it had an arena. Returns whether it has another layout now."""
        self.logged += 1
        has_missed = fates is not None and fates.missed > 0
        if fates is not None and not has_missed and self.layout is not None:
            self.is_settled = not self.has_missed
            return False
        self.has_missed |= has_missed
        self.times += 1
        self.layout = self._laid_out(events, pack)
        return True

    def ran(self, fates: ArenaReport) -> None:
        """A whole step with an arena was not logged. If most of it lay outside, the layout is dropped."""
        if fates.missed > fates.served:
            self.layout, self.times = None, MOST_LAID_OUT
        elif fates.missed:
            self.has_missed, self.is_settled = True, False

    def _laid_out(self, events: Table, pack: PackBlocks) -> RecordedLayout | None:
        """The layout of a logged step. Bytes that outlive this step, unlike planned, reduce the room: gradients do so
        if the next forward belongs to no step.
        """
        assert self.plan.layout is not None
        blocks = recorded_blocks(events, self.plan.layout.least_bytes)
        planned_bytes = sum(one.size_bytes for one in self.plan.layout.places if one.offset == OUTSIDE)
        outside_bytes = int(blocks["size_bytes"][blocks["death"] < 0].sum())
        room_bytes = self.room_bytes - max(0, outside_bytes - planned_bytes)
        layout = recorded_layout(blocks, self.plan.layout.least_bytes, pack, max(0, room_bytes))
        self.larger_bytes = max(0, layout.arena_bytes - room_bytes)
        return None if self.larger_bytes else layout


class KnownSteps:
    """Known steps by plan and variant. A plan's first variant is recorded at once, others when they come again."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, StepVariant], KnownStep] = OrderedDict()
        """By the identity of the plan, which the entry keeps alive."""

    def begin(self, plan: Plan, variant: StepVariant) -> KnownStep | None:
        """The entry for a step that begins; None for the first of a variant, unless it is the plan's first."""
        key = id(plan), variant
        known = self._of.get(key)
        if known is None:
            is_first = all(one.plan is not plan for one in self._of.values())
            known = self._of[key] = KnownStep(plan, steps=int(is_first))
            if len(self._of) > MOST_KNOWN:
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        known.steps += 1
        return known if known.steps > 1 else None

    def forget(self, plan: Plan) -> None:
        """Steps of the plan are no longer followed."""
        for key in [key for key, known in self._of.items() if known.plan is plan]:
            del self._of[key]

    @property
    def largest_bytes(self) -> int:
        return max((one.layout.arena_bytes for one in self._of.values() if one.layout is not None), default=0)


class StepArena:
    """State: the knowledge about each variant of a step, the arena, and whether the running step follows a plan.

    The plan's layout bounds the size of the arena. Steps use the recorded layout of a step of the same variant. They
    use the ordinary allocator in three cases: no such step was recorded yet; its arena would exceed the room that the
    budget leaves; or steps keep differing from their recorded layout.

    Parameters
    ----------
    pack: computes the layout of the blocks of a step; None if there is to be no arena.
    mode: as for :func:`poochplan.apply`.
    """

    def __init__(self, pack: PackBlocks | None, mode: ArenaMode) -> None:
        self._pack, self._mode = pack, mode
        self.is_possible = pack is not None
        self.may_give_up = mode == "auto"
        """Whether the arena may be given up, because the user did not request it explicitly."""
        self._given_up: list[Plan] = []
        """Plans whose steps no longer use the arena."""
        self._steps = KnownSteps()
        self._known: KnownStep | None = None
        """The knowledge about the step that began last."""
        self._has_begun = False
        """Whether a step has used the arena or was logged. Before that there is no memory to give back."""
        self._report: StepReport | None = None
        self._segment: Segment | None = None
        self._is_on = False
        self._is_whole = False
        """Whether the step is a complete example of its variant."""
        self._point = self._left_out = 0
        self._state_entries: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Number of state entries of each optimizer before its last step."""

    @functools.cached_property
    def _runs(self) -> ArenaRuns:
        """Made when the first step is to use the arena: by then the allocator is built."""
        return ArenaRuns(step_scope())

    def begin(self, plan: Plan, segment: Segment) -> None:
        """A segment that follows ``plan`` has passed the first point of the clock."""
        if not self.is_possible:
            return
        self._has_begun = True
        self._learn()
        variant = StepVariant(bool(segment.gradient_bytes), segment.inputs)
        self._known = known = self._steps.begin(plan, variant) if self._is_for(plan) else None
        if known is None:
            self._runs.stands_aside()
            return
        self._is_on = self._is_whole = True
        self._report, self._segment, self._point, self._left_out = segment.report, segment, 1, 0
        self._runs.begin(
            known.layout,
            largest_bytes=self._steps.largest_bytes,
            room_bytes=known.room_bytes,
            log=not known.is_over and not known.is_settled,
            point=1,
        )

    def _is_for(self, plan: Plan) -> bool:
        """Whether steps of the plan may use the arena."""
        fits = self._mode == "on" or plan.holds_arena
        return plan.layout is not None and fits and all(plan is not one for one in self._given_up)

    def held_for(self, plan: Plan) -> int:
        """Bytes of the arena that is there as a step of the plan begins; 0 if it is of another plan, since it goes."""
        return self.arena_bytes if self._known is not None and self._known.plan is plan else 0

    def why_not(self, plan: Plan) -> str:
        """Why steps that follow the plan use no arena although one was requested; else empty."""
        return NO_LAYOUT if self._mode == "on" and plan.layout is None else ""

    def exceeded(self, plan: Plan, over_bytes: int) -> bool | None:
        """A step in the arena exceeded its budget by ``over_bytes``. The next steps get a smaller arena, or none if it
        cannot be so small. Returns whether there is one, and None if this has been done, as a step is looked at twice.
        """
        known = self._known
        if not self._is_for(plan) or known is None or known.plan is not plan or known.layout is None:
            return None
        if known.shrinks(over_bytes):
            self._runs.rests()
            return True
        self._given_up.append(plan)
        self.forget(plan)
        return False

    def lacks(self, plan: Plan) -> int:
        """Bytes that the budget lacks for an arena of the plan's steps; 0 if they have one, or may get one."""
        known = self._known
        if known is None or known.plan is not plan or known.layout is not None or not known.is_over:
            return 0
        return known.larger_bytes

    def at(self, point: int) -> None:
        if self._is_on:
            if self._segment is not None and self._segment.left_out > self._left_out:
                self._runs.fill_gaps()
                self._left_out = self._segment.left_out
            self._point = point
            self._runs.at(point)
            self._runs.marks(point)

    def note(self, storage: torch.UntypedStorage) -> int:
        """A storage is about to be released: a number by which :meth:`again` may find it; 0 if it cannot."""
        arena = self._runs.arena if self._is_on else None
        return 0 if arena is None else arena.note(storage)

    def again(self, note: int, size_bytes: int) -> torch.UntypedStorage | None:
        """The noted storage as it was, if the step leaves out layers and nothing has come into its place. In a whole
        step something comes there before it dies again.
        """
        arena = self._runs.arena if self._is_on and self._left_out else None
        return None if arena is None else arena.again(note, size_bytes)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. That uses the arena once it creates no more state, which must lie outside."""
        if not self.is_possible:
            return
        entries = sum(map(len, optimizer.state.values()))
        if self._state_entries.get(optimizer) != entries:
            self._state_entries[optimizer] = entries
            self._is_whole = False
            self.step_is_over()

    def departed(self) -> None:
        """The segment has left its plan or has raised, or the code that runs now is not part of its step."""
        segment, self._is_whole = self._segment, False
        if self._is_on and segment is not None and segment.diverged and not (segment.raised or segment.aside):
            self._runs.fill_gaps()  # the arena counts as a whole, also where its planned blocks no longer come
        else:
            self.step_is_over()

    def step_is_over(self) -> None:
        """Allocations from here on do not belong to the step. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        fates = self._runs.end()
        if self._report is not None and fates is not None:
            self._report.served_bytes += fates.served_bytes
            self._report.unserved_bytes += fates.unplanned_bytes + fates.taken_bytes
        self._report = None

    def rests(self) -> None:
        """Between two steps: the machine gets the arena's memory back until the next one, except for live blocks."""
        if self._has_begun and not self._is_on:
            self._runs.rests()

    def stands_aside(self) -> None:
        """A segment begins that uses no arena. The machine gets the arena's memory back, except for live blocks."""
        if self._has_begun:
            self._learn()
            self._runs.stands_aside()

    def close(self) -> None:
        """The arena is not used any more; blocks in it stay."""
        self.step_is_over()
        self._is_whole = False
        if self._has_begun:
            self._runs.close()

    def forget(self, plan: Plan) -> None:
        """Steps of the plan are no longer followed."""
        if self._known is not None and self._known.plan is plan:
            self.step_is_over()
            self._runs.events()
            self._runs.rests()
            self._known = None
        self._steps.forget(plan)

    def _learn(self) -> None:
        """Learns from the last step, which has ended. If its blocks did not match the layout, it is laid out again."""
        self.step_is_over()
        fates, events = self._runs.fates, self._runs.events()
        known, is_whole = self._known, self._is_whole and not (self._segment and self._segment.left_out)
        self._is_whole = False  # no step is learned from twice
        if known is None or not is_whole or self._point < len(known.plan.values) + len(known.plan.uses):
            return  # the step has not ended, for example a forward whose loss was not used
        if events is not None:
            assert self._pack is not None
            if known.saw(events, fates, self._pack) and self._runs.has_live_blocks:
                self._runs.leave()  # they may be there to stay, where other blocks have places now
        elif fates is not None:
            known.ran(fates)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena that the step that began last uses; 0 if it uses none."""
        return self._runs.held_bytes if self._has_begun else 0

    def report(self) -> ArenaReport | None:
        """A report on the blocks of the last step that had an arena; None if there were no places for them."""
        known, arena = self._known, self._runs.arena if self._has_begun else None
        if known is None or known.layout is None or arena is None or not self._runs.has_places:
            return ArenaReport(larger_bytes=known.larger_bytes) if known is not None and known.larger_bytes else None
        return arena.report(known.layout.arena_bytes, functools.partial(layer_at, known.plan))


class RepeatedStep:
    """State: the layout, once a run was logged. Without a compiled allocator all runs are ordinary.

    The first run is ordinary and logged, and later runs use an arena. A run that has missed a place is laid out again.
    """

    def __init__(self, pack: PackBlocks) -> None:
        scope = step_scope()
        self._pack, self._runs = pack, ArenaRuns(scope)
        self._layout: RecordedLayout | None = None
        self._times = 0 if scope is not None else MOST_LAID_OUT

    @property
    def is_from_arena(self) -> bool:
        """Whether the last run has missed no place."""
        fates = self._runs.fates
        return fates is not None and not fates.missed

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A block that is one run. Blocks that the previous run left behind are gone when it begins."""
        self._learn()  # from the previous run
        arena_bytes = self._layout.arena_bytes if self._layout is not None else 0
        is_logged = self._times < MOST_LAID_OUT
        self._runs.begin(self._layout, largest_bytes=arena_bytes, room_bytes=arena_bytes, log=is_logged)
        try:
            yield
        finally:
            self._runs.end()

    def rests(self) -> None:
        """The machine gets the arena's memory back until the next run, except for live blocks."""
        self._runs.rests()

    def close(self) -> None:
        """Runs are ordinary again; blocks in the arena stay. Idempotent."""
        self._times, self._layout = MOST_LAID_OUT, None
        self._runs.close()

    def _learn(self) -> None:
        fates, events = self._runs.fates, self._runs.events()
        if events is None:
            return
        if fates is not None and not fates.missed:
            self._times = MOST_LAID_OUT  # no further layout is made
            return
        self._times += 1
        if self._runs.has_live_blocks:
            self._runs.leave()  # they may be there to stay, where other blocks have places now
        self._layout = layout_of_run(events, self._pack) or self._layout


def step_arena_for(
    mode: ArenaMode, device: str, pack: PackBlocks | None, plans: Sequence[Plan] = ()
) -> StepArena | None:
    """The arena for the steps of these plans, or of plans to come; None if they use the ordinary allocator. Warns, once
    in a process, if they would have one and there is no compiled allocator.

    Raises ``UsageError`` if the mode is ``"on"`` and an arena is impossible.
    """
    reason = why_no_step_arena(mode, device, plans) or (why_not_loaded() if mode == "on" else "")
    if not reason and pack is not None:
        return StepArena(pack, mode)
    if mode == "on":
        raise UsageError(f'arena: "on" is not possible: {reason}; take "auto" to train without an arena')
    if reason and reason == why_unavailable() and (line := untold_absence()):
        warn(line)
    return None


def why_no_step_arena(mode: ArenaMode, device: str, plans: Sequence[Plan]) -> str:
    """One line that says why steps cannot use an arena; empty if they can."""
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
    return why_unavailable()
