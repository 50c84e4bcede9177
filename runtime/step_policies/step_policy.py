"""StepPolicy decides about each saved value of one segment. Chooser gives each segment its step policy.

KeepAll is the simplest policy, and a base for others.

A step policy never touches a storage. It answers with a decision, or with :class:`Actions` for the mechanism.
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
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord
from poochplan.runtime.run_report import FallbackKind


class Actions(NamedTuple):
    """The actions at one point, in this order."""

    queue_out: Sequence[SavedValue] = ()
    """Start their copies to the host."""
    give_up: Sequence[SavedValue] = ()
    """Wait for these copies, and release the device storages."""
    bring_back: Sequence[SavedValue] = ()
    """Start their copies back."""
    rebuild: Sequence[SavedValue] = ()
    """Replay them."""
    record: bool | None = None
    """Record from the next op on (true) or stop (false); None for no change."""


NOTHING = Actions()


class Diverged(Exception):  # noqa: N818 - a verdict, caught by the engine
    """The save or use is not the one that the step policy expects. The policy has done nothing about it."""

    def __init__(
        self, reason: str, kind: FallbackKind = FallbackKind.DIVERGED, departure: Departure | None = None
    ) -> None:
        super().__init__(f"{_SAID[kind]} {reason}")
        self.reason = reason
        self.kind = kind
        self.departure = departure
        self.advice = ""
        """The change and the remedy, for the reader of the message, if they are known."""


_SAID = {
    FallbackKind.DIVERGED: "the step diverged from the plan at",
    FallbackKind.NO_PLAN: "no plan of the set fits the step by",
}


class StepPolicy:
    """Decides in one segment. Each of its methods may raise ``Diverged`` or ``DivergenceError``.

    This class itself keeps everything, and moves and replays nothing.
    """

    instructions: Instructions | None = None
    """The instructions whose planned places in the host tier its values take; None if they have no planned places."""

    def begin(self, segment: Segment) -> Actions:
        return NOTHING

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        """Decides about a tensor whose storage is not a live value yet, and which gets the ``ordinal``-th handle of the
        segment. The decision is final, unless the recipe fails.

        ``index``: its save point; None if its storage has had one, and was written since or is no longer held.
        """
        return Decision.KEEP

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        """A further handle, the ``ordinal``-th, for the value of save point ``index`` (None outside a plan)."""

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        """Actions at save point ``index``; the value that was just decided about exists."""
        return NOTHING

    def at_use(self, number: int, handle: SavedHandle, saves: int) -> Actions:
        """Actions at the ``number``-th use point, after ``saves`` save points: the first use of this handle."""
        return NOTHING

    def before_drop(self, value: SavedValue) -> None:
        """The value has its recipe, and is about to be dropped."""

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        """No recipe could be made for the value: it is swapped now."""
        return NOTHING

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        """The host could not take the value: it is kept (rule 9). Raises if the value must not be kept."""

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        """Returns the policy for the rest of the segment, and the actions for the values that exist."""
        return self, NOTHING

    def end(self, segment: Segment, outcome: Outcome) -> None:
        """The segment has ended; its totals are in ``segment.report``."""


class Chooser(Protocol):
    """Gives each segment its step policy."""

    @property
    def alternatives(self) -> Sequence[Instructions]:
        """All instructions that a segment may follow. The host tier is made large enough for each of them."""

    def choose(self, segment: Segment) -> StepPolicy | None:
        """The step policy of a segment; None if the segment's inputs must be known first.

        It is called when the segment begins, when the model is called, and at the first save, where it must decide.
        """


class KeepAll(StepPolicy):
    """Moves and replays nothing: the step is the in-core one plus the time of the hooks. Stateless."""


class SwapEach(StepPolicy):
    """State: the value that was swapped last. It is released when the next one is saved.

    Values that existed before the step are kept: other code holds them anyway.

    Parameters
    ----------
    at_once: wait for each copy and release the value at its own save. A value that cannot be written is then an error,
        because the step does not fit with it.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._latest: weakref.ref[SavedValue] | None = None

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        return Decision.KEEP if record.was_there or _is_part_of_data(tensor, record) else Decision.SWAP

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        return self.take([value])

    def take(self, values: Iterable[SavedValue]) -> Actions:
        """Swaps these values, in order."""
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
    """The error of a step that does not fit without the host tier, when a value cannot be ``what`` there."""
    return SpillError(
        f"profile: a saved value could not be {what} on the host tier ({error.strerror}); "
        "expected room for all that the step saves; free space, or name another spill directory"
    )


def _is_part_of_data(tensor: torch.Tensor, record: StorageRecord) -> bool:
    """Whether it looks like a part of a data set, such as a batch of labels. Swapping it would free nothing."""
    is_part = tensor.nbytes < tensor.untyped_storage().nbytes()
    return is_part and tensor.is_leaf and not tensor.requires_grad and record.birth is None


SHARE_BETWEEN_LOOKS = 0.1
"""Share of the free memory that was found last. When the values kept since exceed it, it is read again."""
LOOKS_SHARE = 0.02
"""Share of a loop's time that reading the free memory may take. One reading opens some files of the system."""
WORKSPACE = 2
"""This many times the largest saved value is left free, for memory that ops use besides their results."""


class KeepWhileRoom(SwapEach):
    """State: the bytes kept since the free memory was last read, and whether memory was too short in this step.

    Kept values stay where they are. From the first save without room on, each value is swapped at its own save. One
    object serves many steps.

    Parameters
    ----------
    room: bytes that may still be taken, minus the known future needs (gradients, the state of optimizers).
    is_short: called once in a step, before its first value is swapped.
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

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        if super().saved(index, ordinal, tensor, record) is Decision.KEEP:
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
