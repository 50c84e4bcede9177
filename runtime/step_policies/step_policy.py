"""Step policy: what decides, in one segment, about each saved value. Chooser: what gives each segment its step policy.

KeepAll is the simplest one, and a base for others.

A step policy never touches a storage. It answers with a decision, or with :class:`Actions`: data that the engine's
mechanism carries out.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision, Departure, Instructions
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.saved_value import Handle, SavedValue
from poochplan.runtime.replays.recorded import StorageRecord
from poochplan.runtime.replays.replay import NotReplayable
from poochplan.runtime.run_report import FallbackKind


class Actions(NamedTuple):
    """What is to be done at one point, in this order."""

    queue_out: Sequence[SavedValue] = ()
    """Start their copies to the host."""
    give_up: Sequence[SavedValue] = ()
    """Wait for these copies, and let go of the device storages."""
    bring_back: Sequence[SavedValue] = ()
    """Start their copies back."""
    rebuild: Sequence[SavedValue] = ()
    """Replay them."""
    record: bool | None = None
    """From the next op on record, or do not; None for no change."""


NOTHING = Actions()


class Diverged(Exception):  # noqa: N818 - a verdict, caught by the engine
    """What is saved or used is not what the step policy was made for; it has done nothing about it."""

    def __init__(
        self, reason: str, kind: FallbackKind = FallbackKind.DIVERGED, departure: Departure | None = None
    ) -> None:
        super().__init__(f"{_SAID[kind]} {reason}")
        self.reason = reason
        self.kind = kind
        self.departure = departure
        self.advice = ""
        """What has changed and what to do, where somebody knows; for those who read the message."""


_SAID = {
    FallbackKind.DIVERGED: "the step diverged from the plan at",
    FallbackKind.NO_PLAN: "no plan of the set fits the step by",
}


class StepPolicy(Protocol):
    """Decides in one segment. Any of its answers may be ``Diverged`` raised, or ``DivergenceError``."""

    @property
    def instructions(self) -> Instructions | None:
        """Whose planned places in the host tier its values take; None when they have none."""

    def begin(self, segment: Segment) -> Actions:
        """The segment begins."""

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        """A tensor is saved whose storage is no live value yet: what becomes of it. Final but for a failed recipe.

        ``index``: its save point; None when its storage has had one (written since, or nothing held it any more).
        """

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        """The ``ordinal``-th handle of the segment is made, of what had save point ``index``; None outside a plan."""

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        """The value that was just decided about is there: what happens at its save point ``index``."""

    def at_use(self, number: int, handle: Handle, saves: int) -> Actions:
        """The ``number``-th use point, after ``saves`` save points: the first use of this handle."""

    def before_drop(self, value: SavedValue) -> None:
        """It has its recipe, and is about to be let go of."""

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        """No recipe could be made for it: it is to be swapped now."""

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        """The host does not take it: it is kept (rule 9). Raises when it must not be."""

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        """Who decides for the rest of the segment, and what becomes of the values that are there."""

    def end(self, segment: Segment, outcome: Outcome) -> None:
        """The segment has ended; ``segment.report`` says what it took."""


class Chooser(Protocol):
    """Gives each segment its step policy."""

    @property
    def alternatives(self) -> Sequence[Instructions]:
        """All that a segment may be given to follow: the host tier is made large enough for any of them."""

    def choose(self, segment: Segment) -> StepPolicy | None:
        """The step policy of a segment; None while its inputs have to be known first.

        It is asked as the segment begins, when the model is called, and at the first save; there it has to say.
        """


class KeepAll:
    """Nothing is moved or replayed: the step is the in-core one, but for what the hooks themselves take. Stateless."""

    instructions: Instructions | None = None

    def begin(self, segment: Segment) -> Actions:
        return NOTHING

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        return Decision.KEEP

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        """Any will do."""

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        return NOTHING

    def at_use(self, number: int, handle: Handle, saves: int) -> Actions:
        return NOTHING

    def before_drop(self, value: SavedValue) -> None:
        """Nothing to do."""

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return NOTHING

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        """It is kept."""

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        return self, NOTHING

    def end(self, segment: Segment, outcome: Outcome) -> None:
        """Nothing to do."""


class SwapEach(KeepAll):
    """State: the value that was swapped last, which is let go of when the next one comes.

    What was there before the step is kept: others hold it all the same.

    Parameters
    ----------
    at_once: wait for each copy and let go of its value at its own save; a value that cannot be written is an error
        then, since the step does not fit with it.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._latest: weakref.ref[SavedValue] | None = None

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        return Decision.KEEP if record.was_there or _is_part_of_data(tensor, record) else Decision.SWAP

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        return self.take([value])

    def take(self, values: Iterable[SavedValue]) -> Actions:
        """Swaps these, in order."""
        coming = tuple(values)
        if self._at_once:
            return Actions(queue_out=coming, give_up=coming)
        latest = self._latest() if self._latest is not None else None
        going = coming if latest is None else (latest, *coming)
        if coming:
            self._latest = weakref.ref(coming[-1])
        return Actions(queue_out=coming, give_up=going[:-1])

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        if self._at_once:
            raise no_room(error, "written") from error


def no_room(error: OSError, what: str) -> SpillError:
    """What a step raises that does not fit without the host tier, when a value cannot be ``what`` there."""
    return SpillError(
        f"profile: a saved value could not be {what} on the host tier ({error.strerror}); "
        "expected room for all that the step saves; free space, or name another spill directory"
    )


def _is_part_of_data(tensor: torch.Tensor, record: StorageRecord) -> bool:
    """Whether it looks like a part of a data set, such as a batch of labels: swapping it would free nothing."""
    is_part = tensor.nbytes < tensor.untyped_storage().nbytes()
    return is_part and tensor.is_leaf and not tensor.requires_grad and record.birth is None


SHARE_BETWEEN_LOOKS = 0.1
"""Of the room that was found last: when so much more has been kept, it is looked at again."""
LOOKS_SHARE = 0.02
"""Of a loop's time that looks between steps may take: one look reads some files of the system."""
WORKSPACE = 2
"""So many of the largest value that the step has saved are left free for what its ops take beside their results."""


class KeepWhileRoom(SwapEach):
    """State: what was kept since the last look at the room, and whether there was too little of it in this step.

    What was kept stays where it is. From the first save without room on each value is swapped at its own save. One
    serves many steps.

    Parameters
    ----------
    room: bytes that may still be taken, less what is known to come (gradients, the state of optimizers).
    is_short: told once per step, before the first value is swapped.
    """

    def __init__(self, room: Callable[[], int], is_short: Callable[[], None]) -> None:
        super().__init__(at_once=True)
        self._room, self._is_short = room, is_short
        self._swaps = False
        self._since_look = self._until_look = self._largest = 0
        self._looked_s = self._look_took_s = 0.0

    def begin(self, segment: Segment) -> Actions:
        if self._swaps or time.monotonic() - self._looked_s > self._look_took_s / LOOKS_SHARE:
            self._until_look = 0
        self._swaps = False
        return super().begin(segment)

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        if super().saved(index, tensor, record) is Decision.KEEP:
            return Decision.KEEP
        if not self._swaps and not self._has_room(tensor.untyped_storage().nbytes()):
            self._swaps = True
            self._is_short()
        return Decision.SWAP if self._swaps else Decision.KEEP

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        return super().at_save(value, index) if value.decision is Decision.SWAP else NOTHING

    def _has_room(self, size_bytes: int) -> bool:
        self._largest = max(self._largest, size_bytes)
        self._since_look += size_bytes
        if self._since_look < self._until_look:
            return True
        start_s = time.monotonic()
        room_bytes = self._room() - WORKSPACE * self._largest
        self._looked_s = time.monotonic()
        self._look_took_s = self._looked_s - start_s
        self._since_look, self._until_look = 0, int(room_bytes * SHARE_BETWEEN_LOOKS)
        return room_bytes > 0
