"""The recorded layouts of steps that follow a plan, by kind of step."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from poochplan.formats.plan import OUTSIDE, Plan
from poochplan.formats.plan_set import Signature
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.runtime.arena.arena import Fates
from poochplan.runtime.arena.library import Table
from poochplan.runtime.arena.recorded_layout import Pack, RecordedLayout, ServedRuns, recorded_blocks, recorded_layout
from poochplan.runtime.metering.allocated import step_scope

MOST_LAID_OUT = 3
"""The steps of a kind are laid out at most this often."""
MOST_LOGGED = 50
"""At most this many steps of a kind are logged, some of which may have missed nothing."""
MOST_KNOWN = 64
"""Kinds beyond this number are forgotten, the longest unused first."""
MOST_BLOCKS = 20_000
"""A step with more blocks is not served."""


class Kind(NamedTuple):
    """Differences between steps of one plan that change which blocks they take."""

    has_gradients: bool
    """Whether gradients exist already: then autograd adds to them in place."""
    inputs: Signature | None
    """Inputs of the model; None if the session does not ask for them."""


@dataclass
class KnownStep:
    """The knowledge about one kind of step under a plan."""

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
    """Bytes outside the arena in addition to the planned ones, found by a served step that exceeded its budget."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is learned."""
        return self.times >= MOST_LAID_OUT or self.logged >= MOST_LOGGED

    @property
    def wants_log(self) -> bool:
        """Whether the step that begins is to be logged."""
        return not self.is_over and not self.is_settled

    @property
    def room_bytes(self) -> int:
        """Room for the arena: its planned bytes, and the rest of the budget."""
        found = self.plan.prediction
        if found.arena_bytes is None or found.arena_peak_bytes is None:
            return 0
        return found.arena_bytes + max(0, self.plan.budget_bytes - found.arena_peak_bytes) - self.grown_bytes

    def shrinks(self, over_bytes: int) -> bool:
        """A served step exceeded its budget by ``over_bytes``: the next steps are laid out in a smaller arena. Returns
        false if the arena cannot be that small.
        """
        if self.layout is None or self.is_over or self.layout.arena_bytes - over_bytes < self.layout.live_bytes:
            return False
        self.grown_bytes += over_bytes + max(0, self.room_bytes - self.layout.arena_bytes)
        self.layout, self.is_settled = None, False
        return True

    def saw(self, events: Table, fates: Fates | None, pack: Pack) -> bool:
        """A whole step was logged, with ``fates`` if an arena served it. Returns whether it has another layout now."""
        self.logged += 1
        has_missed = fates is not None and misses(fates) > 0
        if fates is not None and not has_missed and self.layout is not None:
            self.is_settled = not self.has_missed
            return False
        self.has_missed |= has_missed
        self.times += 1
        self.layout = self._laid_out(events, pack)
        return True

    def served(self, fates: Fates) -> None:
        """A whole step was served that was not logged. If most of it lay outside, the layout is dropped."""
        if misses(fates) > fates.served.blocks:
            self.layout, self.times = None, MOST_LAID_OUT
        elif misses(fates):
            self.has_missed, self.is_settled = True, False

    def _laid_out(self, events: Table, pack: Pack) -> RecordedLayout | None:
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


def misses(fates: Fates) -> int:
    """Number of blocks that lay outside contrary to the layout. Expected blocks that did not come do no harm."""
    return fates.taken.blocks + fates.unplanned.blocks


class KnownSteps:
    """Known steps by plan and kind. A plan's first kind is recorded at once, other kinds when they come again."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, Kind], KnownStep] = OrderedDict()
        """By the identity of the plan, which the entry keeps alive."""

    def begin(self, plan: Plan, kind: Kind) -> KnownStep | None:
        """The entry for a step that begins. None if the step is the first of a kind other than the plan's first kind:
        such a step is not recorded.
        """
        key = id(plan), kind
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
        """The most bytes of any of their layouts' arenas."""
        return max((one.layout.arena_bytes for one in self._of.values() if one.layout is not None), default=0)


class RepeatedStep:
    """State: the layout, once a run was logged. Without a compiled allocator all runs are ordinary.

    The first run is ordinary and logged, and later runs are served. A run that has missed a place is laid out again.
    """

    def __init__(self, pack: Pack) -> None:
        scope = step_scope()
        self._pack, self._runs = pack, ServedRuns(scope)
        self._layout: RecordedLayout | None = None
        self._times = 0 if scope is not None else MOST_LAID_OUT

    @property
    def is_served(self) -> bool:
        """Whether the last run was served completely."""
        fates = self._runs.fates
        return fates is not None and not misses(fates)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A block that is one run. Blocks that the previous run left behind are gone when it begins."""
        self._learn()
        arena_bytes = self._layout.arena_bytes if self._layout is not None else 0
        is_logged = self._times < MOST_LAID_OUT
        self._runs.begin(self._layout, largest_bytes=arena_bytes, room_bytes=arena_bytes, log=is_logged)
        try:
            yield
        finally:
            self._runs.end()

    def rests(self) -> None:
        """The machine gets the arena's memory back until the next run."""
        self._runs.laid.rests()

    def close(self) -> None:
        """Runs are ordinary again; blocks in the arena stay. Idempotent."""
        self._times, self._layout = MOST_LAID_OUT, None
        self._runs.close()

    def _learn(self) -> None:
        """Learns from the previous run, if it was logged."""
        fates, events = self._runs.fates, self._runs.events()
        if events is None:
            return
        if fates is not None and not misses(fates):
            self._times = MOST_LAID_OUT  # no further layout is made
            return
        self._times += 1
        if fates is not None and fates.taken.blocks:
            self._runs.laid.leave()  # blocks with separate places may be there to stay
        blocks = recorded_blocks(events, LEAST_PLACED_BYTES)
        if len(blocks) <= MOST_BLOCKS:
            self._layout = recorded_layout(blocks, LEAST_PLACED_BYTES, self._pack)
