"""StepPolicy decides about each saved value of one segment. Chooser gives each segment its step policy.

KeepAll is the simplest policy, and a base for others.

A step policy never touches a storage. It answers with a decision, or with :class:`Actions` for the mechanism.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision, Departure, Instructions, PlannedValue
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord
from poochplan.runtime.run_report import FallbackKind


class Actions(NamedTuple):
    """The actions at one point, in this order."""

    swap_out: Sequence[SavedValue] = ()
    """Start their copies to the host."""
    release: Sequence[SavedValue] = ()
    """Wait for these copies, and release the device storages."""
    prefetch: Sequence[SavedValue] = ()
    """Start their copies back."""
    replay: Sequence[SavedValue] = ()
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
    sources: Mapping[int, PlannedValue] = MappingProxyType({})
    """The sources of the plan, by save point; these are passed by the engine."""

    def begin(self, segment: Segment) -> Actions:
        return NOTHING

    def followed(self) -> Any:
        """If the rest of the segment needs this policy only where the plan acts: the plan, its values that are saved,
        and those that expect another handle. Else None.
        """
        return None

    def planned_at_save(self, index: int) -> Actions:
        """What :meth:`at_save` returns, for a value that has been noted: see ``native/planned_hooks.h``."""
        return NOTHING

    def planned_at_use(self, number: int) -> Actions:
        """What :meth:`at_use` returns, in the same way."""
        return NOTHING

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        """Decides about a tensor whose storage is not a live value yet, and which gets the ``ordinal``-th handle of the
        segment. The decision is final, unless the recipe fails.

        ``index``: its save point; None if its storage has had one, and was written since or is no longer held.
        """
        return Decision.KEEP

    def at_sourced(self, index: int, ordinal: int, tensor: torch.Tensor) -> None:
        """The next save point is that of a source; the tensor is the next one that is saved. Raises ``LeftOut`` if the
        step leaves out the layers from there on.
        """

    def at_source(self, value: SavedValue | None, index: int) -> Actions:
        """Actions at the save point of a source; ``value`` is None if it is not held."""
        return NOTHING

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
            return Actions(swap_out=coming, release=coming)
        latest = self._latest() if self._latest is not None else None
        going = coming if latest is None else (latest, *coming)
        if coming:
            self._latest = weakref.ref(coming[-1])
        return Actions(swap_out=coming, release=going[:-1])

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        if self._at_once:
            raise no_room(error, "written") from error


def no_room(error: OSError, what: str) -> SpillError:
    """The error of a step that does not fit without the host tier, when a value cannot be ``what`` there."""
    return SpillError(
        f"a saved tensor could not be {what} ({error.strerror}): a step that swaps everything needs room for all that "
        "it saves; free space, or name another spill directory"
    )


def _is_part_of_data(tensor: torch.Tensor, record: StorageRecord) -> bool:
    """Whether it looks like a part of a data set, such as a batch of labels. Swapping it would free nothing."""
    is_part = tensor.nbytes < tensor.untyped_storage().nbytes()
    return is_part and tensor.is_leaf and not tensor.requires_grad and not record.is_born


SHARE_BETWEEN_LOOKS = 0.1
"""Share of the room that was found last. When the values saved and used since exceed it, the room is read again."""
LOOKS_SHARE = 0.02
"""Share of a loop's time that reading the room may take while it suffices. One reading opens some files of the system.
"""
HEADROOM = 4
"""This many times the largest saved value is left free: for one that comes back, and for what an op of backward takes
besides, which are gradients of its size and up to two results between them.
"""


class KeepWhileRoom(SwapEach):
    """State: the values that stay where they are, oldest first, and whether memory was too short in this step.

    From the first point without room on, each value is swapped at its own save. Of those that stayed, as many are
    swapped as bytes are missing, in backward too: the oldest first, because backward needs them last. One object serves
    many steps.

    Parameters
    ----------
    room: bytes that may still be taken, minus the known future needs (gradients, the state of optimizers).
    is_short: called once in a step, before its first value is swapped.
    largest: bytes of the value, or of a larger one that the next op may make of it.
    """

    def __init__(
        self,
        room: Callable[[], int],
        is_short: Callable[[], None],
        largest: Callable[[SavedValue], int] = lambda value: value.size_bytes,
    ) -> None:
        super().__init__(at_once=True)
        self._room, self._is_short, self._largest_at = room, is_short, largest
        self._stay = deque[weakref.ref[SavedValue]]()
        self.swaps = False
        """Whether memory was too short for the step."""
        self._since_look = self._until_look = self._largest = 0
        self._looked_s = self._look_took_s = 0.0

    def begin(self, segment: Segment) -> Actions:
        if self.swaps or time.monotonic() - self._looked_s > self._look_took_s / LOOKS_SHARE:
            self._until_look = 0
        self.swaps = False
        self._stay.clear()
        return super().begin(segment)

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        if value.decision is Decision.KEEP:
            return NOTHING
        largest_bytes = self._largest_at(value)
        if largest_bytes > self._largest:
            self._largest, self._until_look = largest_bytes, 0
        going = self._going(value)
        if self.swaps:
            return self.take([*going, value])
        self._stay.append(weakref.ref(value))
        return NOTHING

    def at_use(self, number: int, handle: SavedHandle, saves: int) -> Actions:
        assert handle.value is not None
        going = self._going(handle.value)
        return self.take(going) if going else NOTHING

    def _going(self, at: SavedValue) -> list[SavedValue]:
        """The values to swap so that there is room, at a save or use of that value, which is not one of them."""
        going: list[SavedValue] = []
        missing_bytes = self._missing_bytes(at.size_bytes)
        while missing_bytes > 0 and self._stay:
            value = self._stay.popleft()()
            if value is not None and value is not at:
                going.append(value)
                missing_bytes -= value.size_bytes
        return going

    def _missing_bytes(self, size_bytes: int) -> int:
        self._since_look += size_bytes
        if self._since_look < self._until_look or (self.swaps and not self._stay):
            return 0
        start_s = time.monotonic()
        room_bytes = self._room() - HEADROOM * self._largest
        self._looked_s = time.monotonic()
        self._look_took_s = self._looked_s - start_s
        self._since_look, self._until_look = 0, int(room_bytes * SHARE_BETWEEN_LOOKS)
        if room_bytes <= 0 and not self.swaps:
            self.swaps = True
            self._is_short()
        return -room_bytes
