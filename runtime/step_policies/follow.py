"""Follow: does what a plan says, as long as the step is the planned one (engine rules 7 and 8)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch

from poochplan.errors import DivergenceError
from poochplan.formats.plan import Decision, Instructions, PointActions
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.closure import NotReplayable
from poochplan.runtime.replays.recorded import StorageRecord

from .course import Course
from .diagnosis import (
    UNKNOWN,
    Expected,
    Found,
    departed_at_pack,
    departed_at_save,
    departed_at_use,
    what_changed,
)
from .step_policy import NOTHING, Actions, Diverged, KeepAll, StepPolicy
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
            advice = reason.advice or "make a new profile and plan for this step"
            raise DivergenceError(f"{reason}: {advice}")


NOT_CALLED = "a layer saves something before the planned model is called"
_RECORD = {"on": True, "off": False, "": None}


class Follow:
    """State: the values of this segment, by save point.

    Parameters
    ----------
    course: what to follow.
    safe: what decides when the step is not the planned one, and for values that cannot be recomputed.
    policy: whether such a step is an error.
    expected: what else is known of the step; one that calls its model has values of layers only once it is called.
    """

    def __init__(
        self,
        course: Course,
        safe: SwapEach,
        policy: DivergencePolicy = DivergencePolicy.WARN,
        *,
        expected: Expected = UNKNOWN,
    ) -> None:
        self.instructions: Instructions | None = course.instructions
        self._course = course
        self._planned = course.instructions.values
        self._handles, self._uses = course.instructions.handles, course.instructions.uses
        self._last = len(self._planned) - 1
        self._safe = safe
        self._policy = policy
        self._values: dict[int, weakref.ref[SavedValue]] = {}
        self._to_come: dict[int, SavedValue] = {}
        """Values of which a handle is still to be made, by the last: autograd may let go of those so far before."""
        self._expected = expected
        self._awaits_call: Segment | None = None
        self._found: Found | None = None
        """Where the step differs."""

    def begin(self, segment: Segment) -> Actions:
        self._segment = segment
        if self._expected.inputs and segment.model is None and not segment.announced:
            self._awaits_call = segment
        return Actions(record=True) if self._course.instructions.record_from_start else NOTHING

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        if index is None:
            return Decision.KEEP
        if self._awaits_call is not None:
            self._before_the_call(index)
        reason = self._course.why_not_save(index, tensor)
        if reason:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._found = Found(self._course.planned_at(index), dtype, self._course.layers_from(index))
            raise Diverged(reason, departure=departed_at_save(self._course.instructions, index, tensor))
        return self._planned[index].decision

    def _before_the_call(self, index: int) -> None:
        """What a layer would save is not the planned value while the model has not been called."""
        assert self._awaits_call is not None
        if self._awaits_call.model is not None:
            self._awaits_call = None
        elif index <= self._last and self._planned[index].layer:
            raise Diverged(NOT_CALLED)

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        handles = self._handles
        if self._to_come:
            self._to_come.pop(ordinal, None)
        if index is None or ordinal >= len(handles) or handles[ordinal] != index:
            departure = departed_at_pack(self._course.instructions, ordinal, index, tensor)
            here = handles[ordinal] if ordinal < len(handles) else len(self._planned)
            self._found = Found(self._course.planned_at(here), layers_to_come=self._course.layers_from(here))
            raise Diverged(self._course.why_not_handle(ordinal, index, tensor), departure=departure)

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        if index is None:
            return NOTHING
        value.index = index
        value.name = self._planned[index].name
        self._values[index] = weakref.ref(value)
        if self._course.last_handles[index] >= 0:
            self._to_come[self._course.last_handles[index]] = value
        planned = self._course.at_save[index]
        actions = NOTHING if planned is None else self._resolved(planned)
        # Nothing that comes behind the last save is replayed; backward must not run under the recorder.
        return actions._replace(record=False) if index == self._last else actions

    def at_use(self, number: int, handle: Handle, saves: int) -> Actions:
        uses = self._uses
        self._to_come.clear()
        if saves <= self._last or number >= len(uses) or uses[number] != handle.ordinal:
            departure = departed_at_use(self._course.instructions, number, handle.ordinal, saves)
            to_come = self._course.layers_from(saves)
            self._found = Found(self._course.planned_at(saves), layers_to_come=to_come, in_backward=saves > self._last)
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

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self._to_come.clear()
        if self._found is not None:
            reason.advice = what_changed(self._segment, self._expected, self._found)
        self._policy.judge(reason)
        if self._awaits_call is not None and self._awaits_call.model is None:  # perhaps not a step of the model's
            self._awaits_call.aside = True
            return KeepAll(), NOTHING
        return self._safe, self._safe.take(self._alive(sorted(self._values)))

    def end(self, segment: Segment, outcome: Outcome) -> None:
        self._to_come.clear()


class Always:
    """A chooser that gives every segment a policy of one make. ``alternatives``: the instructions that these follow."""

    def __init__(self, make: Callable[[], StepPolicy], alternatives: Sequence[Instructions] = ()) -> None:
        self._make = make
        self.alternatives = alternatives

    @classmethod
    def following(cls, instructions: Instructions) -> Always:
        """Segments follow these."""
        course = Course.of(instructions)
        return cls(lambda: Follow(course, SwapEach()), [instructions])

    def choose(self, segment: Segment) -> StepPolicy:
        return self._make()
