"""Follow: does what a plan says, as long as the step is the planned one (engine rules 7 and 8)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import StrEnum

import torch

from poochplan.errors import DivergenceError
from poochplan.formats.plan import Decision, Instructions, PointActions
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.closure import NotReplayable
from poochplan.runtime.replays.tape import StorageRecord

from .course import Course
from .departures import departed_at_pack, departed_at_save, departed_at_use
from .driver import NOTHING, Actions, Diverged, Driver
from .swap_each import SwapEach


class DivergencePolicy(StrEnum):
    """What a step that is not the planned one does."""

    WARN = "warn"
    """Says so once a session; the rest of the step swaps every saved value."""
    ERROR = "error"
    """Raises ``DivergenceError``."""

    def judge(self, reason: Diverged) -> None:
        """Raises ``DivergenceError`` if that is what is to be done."""
        if self is DivergencePolicy.ERROR:
            raise DivergenceError(f"{reason}; make a new profile and plan for this step")


_RECORD = {"on": True, "off": False, "": None}


class Follow:
    """State: the values of this segment, by save point.

    Parameters
    ----------
    course: what to follow.
    safe: what decides when the step is not the planned one, and for values that cannot be recomputed.
    policy: whether such a step is an error.
    """

    def __init__(self, course: Course, safe: SwapEach, policy: DivergencePolicy = DivergencePolicy.WARN) -> None:
        self.instructions: Instructions | None = course.instructions
        self._course = course
        self._planned = course.instructions.values
        self._handles, self._uses = course.instructions.handles, course.instructions.uses
        self._last = len(self._planned) - 1
        self._safe = safe
        self._policy = policy
        self._values: dict[int, weakref.ref[SavedValue]] = {}

    def begin(self, segment: Segment) -> Actions:
        return Actions(record=True) if self._course.instructions.record_from_start else NOTHING

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        if index is None:
            return Decision.KEEP
        reason = self._course.why_not_save(index, tensor)
        if reason:
            raise Diverged(reason, departure=departed_at_save(self._course.instructions, index, tensor))
        return self._planned[index].decision

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        handles = self._handles
        if index is None or ordinal >= len(handles) or handles[ordinal] != index:
            departure = departed_at_pack(self._course.instructions, ordinal, index, tensor)
            raise Diverged(self._course.why_not_handle(ordinal, index, tensor), departure=departure)

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        if index is None:
            return NOTHING
        value.index = index
        value.name = self._planned[index].name
        self._values[index] = weakref.ref(value)
        planned = self._course.at_save[index]
        actions = NOTHING if planned is None else self._resolved(planned)
        # Nothing that comes behind the last save is replayed; backward must not run under the recorder.
        return actions._replace(record=False) if index == self._last else actions

    def at_use(self, number: int, handle: Handle, saves: int) -> Actions:
        uses = self._uses
        if saves <= self._last or number >= len(uses) or uses[number] != handle.ordinal:
            departure = departed_at_use(self._course.instructions, number, handle.ordinal, saves)
            raise Diverged(self._course.why_not_use(number, handle.ordinal, saves), departure=departure)
        planned = self._course.at_use[number]
        return NOTHING if planned is None else self._resolved(planned)

    def _resolved(self, planned: PointActions) -> Actions:
        alive, out, release, fetch, again = (
            self._alive,
            planned.swap_out,
            planned.release,
            planned.prefetch,
            planned.replay,
        )
        return Actions(
            alive(out) if out else (),
            alive(release) if release else (),
            alive(fetch) if fetch else (),
            alive(again) if again else (),
            _RECORD[planned.record],
        )

    def _alive(self, indices: Sequence[int]) -> Sequence[SavedValue]:
        values = self._values
        found = [values[index]() for index in indices if index in values]
        return [value for value in found if value is not None]

    def before_drop(self, value: SavedValue) -> None:
        """The plan says so."""

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return self._safe.take([value])

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        """It is kept: larger than planned, not wrong."""

    def diverged(self, reason: Diverged) -> tuple[Driver, Actions]:
        self._policy.judge(reason)
        return self._safe, self._safe.take(self._alive(sorted(self._values)))

    def end(self, segment: Segment, outcome: Outcome) -> None:
        """Nothing to do."""
