"""What is known of steps that follow a plan, kind by kind: each is laid out as a step of the kind was."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from poochplan.formats.plan import OUTSIDE, Plan
from poochplan.formats.plan_set import Signature
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.runtime.allocator.arena import Fates
from poochplan.runtime.allocator.library import Table
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.served_runs import Pack, RecordedLayout, ServedRuns, recorded_blocks, recorded_layout

MOST_LAID_OUT = 3
"""So many times what a kind of step takes is laid out."""
MOST_LOGGED = 50
"""So many steps of a kind are logged, of which some may have missed nothing."""
MOST_KNOWN = 64
"""Those that were not used for longest are forgotten."""
MOST_BLOCKS = 20_000
"""A step with more is not served."""


class Kind(NamedTuple):
    """What steps that follow one plan may differ in, so that they take other blocks."""

    has_gradients: bool
    """Whether gradients are there already: then autograd adds to them in place."""
    inputs: Signature | None
    """Those that the model is called with; None where the session does not ask."""


@dataclass
class KnownStep:
    """What is known of one kind of step under a plan."""

    plan: Plan
    steps: int = 0
    """So many have begun."""
    layout: RecordedLayout | None = None
    """As one of them was; None until there is one, and where its arena would be too large."""
    times: int = 0
    """So often it has been laid out."""
    logged: int = 0
    has_missed: bool = False
    """Whether a step had blocks outside against the layout. Others may do so again that look the same as they begin: of
    several micro-batches only the last has the optimizer.
    """
    is_settled: bool = False
    """Whether a logged step has missed nothing, and none ever has."""
    larger_bytes: int = 0
    """How much the arena of the last step that was looked at would be above what there is room for."""
    grown_bytes: int = 0
    """How much more lies outside the arena than was planned, as a served step has shown that exceeded its budget."""

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
        """For the arena: what was planned for it, and what the budget has beside."""
        found = self.plan.prediction
        if found.arena_bytes is None or found.arena_peak_bytes is None:
            return 0
        return found.arena_bytes + max(0, self.plan.budget_bytes - found.arena_peak_bytes) - self.grown_bytes

    def shrinks(self, over_bytes: int) -> bool:
        """A served step took so much more than its budget: the next one is laid out in a smaller arena. False where
        none can be.
        """
        if self.layout is None or self.is_over or self.layout.arena_bytes - over_bytes < self.layout.live_bytes:
            return False
        self.grown_bytes += over_bytes + max(0, self.room_bytes - self.layout.arena_bytes)
        self.layout, self.is_settled = None, False
        return True

    def saw(self, events: Table, fates: Fates | None, pack: Pack) -> bool:
        """A whole step was logged, ``fates`` of which an arena has served; whether there is another layout now."""
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
        """A whole step was served that was not logged. Where most of it lay outside there is no layout any more."""
        if misses(fates) > fates.served.blocks:
            self.layout, self.times = None, MOST_LAID_OUT
        elif misses(fates):
            self.has_missed, self.is_settled = True, False

    def _laid_out(self, events: Table, pack: Pack) -> RecordedLayout | None:
        """The room is less by what more outlives this step than was planned: gradients do where the next forward is
        none of a step.
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
    """Blocks that lay outside against the layout. What was expected and did not come does no harm."""
    return fates.taken.blocks + fates.unplanned.blocks


class KnownSteps:
    """By plan and kind. A plan's first kind is learned at once, others when they come again."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, Kind], KnownStep] = OrderedDict()
        """By the identity of the plan, which the entry holds."""

    def begin(self, plan: Plan, kind: Kind) -> KnownStep | None:
        """That of a step which begins; None where there is nothing to be learned of it, as it is the first of a kind
        that is not the plan's first kind.
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
        """Its steps are not followed any more."""
        for key in [key for key, known in self._of.items() if known.plan is plan]:
            del self._of[key]

    @property
    def largest_bytes(self) -> int:
        """Of their layouts' arenas."""
        return max((one.layout.arena_bytes for one in self._of.values() if one.layout is not None), default=0)


class RepeatedStep:
    """State: the layout, once a run was written down. Without a compiled allocator all runs are ordinary.

    The first run is ordinary and written down, and those behind it are served. What one has missed is laid out anew.
    """

    def __init__(self, pack: Pack) -> None:
        scope = step_scope()
        self._pack, self._runs = pack, ServedRuns(scope)
        self._layout: RecordedLayout | None = None
        self._times = 0 if scope is not None else MOST_LAID_OUT

    @property
    def is_served(self) -> bool:
        """Whether the last run was served, all of it."""
        fates = self._runs.fates
        return fates is not None and not misses(fates)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A block that is one run. What the one before has left behind is gone by its begin."""
        self._learn()
        arena_bytes = self._layout.arena_bytes if self._layout is not None else 0
        is_logged = self._times < MOST_LAID_OUT
        self._runs.begin(self._layout, largest_bytes=arena_bytes, room_bytes=arena_bytes, log=is_logged)
        try:
            yield
        finally:
            self._runs.end()

    def rests(self) -> None:
        """The machine has the arena's memory back until the next run."""
        self._runs.laid.rests()

    def close(self) -> None:
        """Runs are ordinary again; what lies in the arena stays as it is. Idempotent."""
        self._times, self._layout = MOST_LAID_OUT, None
        self._runs.close()

    def _learn(self) -> None:
        """From the run before, if it was written down."""
        fates, events = self._runs.fates, self._runs.events()
        if events is None:
            return
        if fates is not None and not misses(fates):
            self._times = MOST_LAID_OUT  # as it is
            return
        self._times += 1
        if fates is not None and fates.taken.blocks:
            self._runs.laid.leave()  # what lies in places of its own there may be there to stay
        blocks = recorded_blocks(events, LEAST_PLACED_BYTES)
        if len(blocks) <= MOST_BLOCKS:
            self._layout = recorded_layout(blocks, LEAST_PLACED_BYTES, self._pack)
