"""Follow: carries out a plan, as long as the step matches it (engine rules 7 and 8)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from poochplan.errors import DivergenceError, UsageError
from poochplan.formats.plan import Decision, Instructions, PlannedValue, PointActions
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.saved_value import Handle, SavedValue
from poochplan.runtime.replays.recorded import StorageRecord
from poochplan.runtime.replays.replay import NotReplayable

from .diagnosis import (
    UNKNOWN,
    Expected,
    Found,
    departed_at_pack,
    departed_at_save,
    departed_at_use,
    found_text,
    what_changed,
)
from .step_policy import NOTHING, Actions, Diverged, KeepAll, StepPolicy, SwapEach


class DivergencePolicy(StrEnum):
    """What happens in a step that diverges from its plan."""

    WARN = "warn"
    """One warning in a session; the rest of the step swaps every saved value."""
    ERROR = "error"
    """Raises ``DivergenceError``."""

    def judge(self, reason: Diverged) -> None:
        """Raises ``DivergenceError`` if this is the policy."""
        if self is DivergencePolicy.ERROR:
            advice = reason.advice or "make a new profile and plan for this step"
            raise DivergenceError(f"{reason}: {advice}")


NOT_CALLED = "a layer saves something before the planned model is called"
_RECORD = {"on": True, "off": False, "": None}


class Follow(StepPolicy):
    """State: the values of this segment, by save point.

    Parameters
    ----------
    course: the plan to follow.
    safe: decides if the step diverges, and for values that cannot be recomputed.
    policy: whether a diverged step is an error.
    expected: other facts of the planned step. If the step calls its model, values of layers are saved only after that
        call.
    """

    def __init__(
        self,
        course: Course,
        safe: SwapEach,
        policy: DivergencePolicy = DivergencePolicy.WARN,
        *,
        expected: Expected = UNKNOWN,
    ) -> None:
        self.instructions = course.instructions
        self._course = course
        self._planned = course.instructions.values
        self._handles, self._uses = course.instructions.handles, course.instructions.uses
        self._last = len(self._planned) - 1
        self._safe = safe
        self._policy = policy
        self._values: dict[int, weakref.ref[SavedValue]] = {}
        self._to_come: dict[int, SavedValue] = {}
        """Values that still expect a handle, by the position of the last one. Autograd may release their present
        handles before that."""
        self._expected = expected
        self._awaits_call: Segment | None = None
        self._found: Found | None = None
        """How the step differs from the plan."""

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
        """If the model has not been called, a tensor is not the planned value of a layer."""
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
        # No op after the last save is replayed, and backward must not run under the recorder.
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

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return self._safe.take([value])

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self._to_come.clear()
        if self._found is not None:
            reason.advice = what_changed(self._segment, self._expected, self._found)
        self._policy.judge(reason)
        if self._awaits_call is not None and self._awaits_call.model is None:  # perhaps not a step of the model
            self._awaits_call.aside = True
            return KeepAll(), NOTHING
        return self._safe, self._safe.take(self._alive(sorted(self._values)))

    def end(self, segment: Segment, outcome: Outcome) -> None:
        self._to_come.clear()


class Always:
    """A chooser that gives every segment a policy from one factory. ``alternatives``: the instructions that these
    follow.
    """

    def __init__(self, make: Callable[[], StepPolicy], alternatives: Sequence[Instructions] = ()) -> None:
        self._make = make
        self.alternatives = alternatives

    @classmethod
    def following(cls, instructions: Instructions) -> Always:
        """A chooser whose segments follow these instructions."""
        course = Course.of(instructions)
        return cls(lambda: Follow(course, SwapEach()), [instructions])

    def choose(self, segment: Segment) -> StepPolicy:
        return self._make()


@dataclass(frozen=True, eq=False)
class Course:
    """Instructions, with their actions by point.

    ``exact``: whether each save must have the planned shape and bytes. Otherwise it may be smaller, so that a plan for
    larger inputs can be used: no storage takes more than planned, on the device and on the host.
    """

    instructions: Instructions
    at_save: tuple[PointActions | None, ...]
    at_use: tuple[PointActions | None, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the values."""
    last_handles: tuple[int, ...]
    """For each value the handle that is made last, or -1 if it has only one."""
    exact: bool = True

    @classmethod
    def of(cls, instructions: Instructions, *, exact: bool = True) -> Course:
        """Raises ``UsageError`` if torch lacks the dtype of a value."""
        at_save = {actions.index: actions for actions in instructions.schedule if actions.at == "save"}
        at_use = {actions.index: actions for actions in instructions.schedule if actions.at == "use"}
        return cls(
            instructions,
            tuple(map(at_save.get, range(len(instructions.values)))),
            tuple(map(at_use.get, range(len(instructions.uses)))),
            tuple(_dtype(number, value) for number, value in enumerate(instructions.values)),
            _last_handles(instructions),
            exact,
        )

    def why_not_save(self, index: int, tensor: torch.Tensor) -> str:
        """Why the tensor cannot be the planned value of this save point; empty when it can."""
        if index >= len(self.instructions.values):
            return self._beyond(tensor)
        planned = self.instructions.values[index]
        size_bytes = tensor.untyped_storage().nbytes()
        fits = tensor.dtype is self.dtypes[index] and (
            size_bytes == planned.size_bytes and tensor.shape == planned.shape
            if self.exact
            else tensor.ndim == len(planned.shape) and size_bytes <= planned.size_bytes
        )
        return "" if fits else self._instead(index, found_text(tensor))

    def why_not_handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> str:
        """Why the ``ordinal``-th pack cannot be one of save point ``index`` (None: of none)."""
        planned = self.instructions.handles[ordinal] if ordinal < len(self.instructions.handles) else None
        if planned is None:
            return self._beyond(tensor)
        which = "no save point" if index is None else f"save point {index}, {_named(self.instructions.values[index])}"
        return self._instead(planned, f"{found_text(tensor)} of {which}", f" of save point {planned}")

    def why_not_use(self, number: int, ordinal: int, saves: int) -> str:
        """Why the unpack of handle ``ordinal`` after ``saves`` save points cannot be use point ``number``."""
        if saves < len(self.instructions.values):
            return self._instead(saves, f"that backward has begun, with {self._of_handle(ordinal)}")
        planned = self.instructions.uses[number] if number < len(self.instructions.uses) else None
        wanted = "its end" if planned is None else self._of_handle(planned)
        return f"backward: planned {wanted}, found {self._of_handle(ordinal)}"

    def planned_at(self, index: int) -> PlannedValue | None:
        """The value of this save point; None after the last one."""
        return self.instructions.values[index] if index < len(self.instructions.values) else None

    def layers_from(self, index: int) -> bool:
        """Whether a layer of the model saves a value from this save point on."""
        return any(value.layer for value in self.instructions.values[index:])

    def _instead(self, index: int, found: str, also: str = "") -> str:
        value = self.instructions.values[index]
        most = "" if self.exact else "at most "
        return f"{_named(value)}: planned {most}{_shape(value)} of {value.size_bytes} bytes{also}, found {found}"

    def _beyond(self, tensor: torch.Tensor) -> str:
        last = f"what comes after {_named(self.instructions.values[-1])}" if self.instructions.values else "its start"
        return f"{last}: planned backward, found that {found_text(tensor)} is saved"

    def _of_handle(self, ordinal: int) -> str:
        if ordinal >= len(self.instructions.handles):
            return "nothing that was planned"
        value = self.instructions.values[self.instructions.handles[ordinal]]
        return f"{_named(value)} {_shape(value)} by handle {ordinal}"


def _last_handles(instructions: Instructions) -> tuple[int, ...]:
    last, again = {}, set()
    for ordinal, value in enumerate(instructions.handles):
        if value in last:
            again.add(value)
        last[value] = ordinal
    return tuple(last[value] if value in again else -1 for value in range(len(instructions.values)))


def _dtype(number: int, value: PlannedValue) -> torch.dtype:
    found = getattr(torch, value.dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"plan: values[{number}].dtype: expected a dtype of torch {torch.__version__}, such as float32, found "
            f"{value.dtype[:40]!r}; make a new plan here"
        )
    return found


def _shape(value: PlannedValue) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _named(value: PlannedValue) -> str:
    where = f"(layer {value.layer})" if value.layer else "(of no layer)"
    what = value.name.rpartition("/")[2].partition("#")[0]
    if value.name.startswith("before/"):
        return f"what was there before the step, as {what} {where}"
    return f"{value.name if value.layer else what} {where}"
