"""SwapEach: the safe policy, which needs no plan. Every saved value is swapped, and fetched when it is used.

KeepWhileRoom keeps them as long as memory has room, and swaps from there on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.recorded import StorageRecord

from .step_policy import NOTHING, Actions, KeepAll


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
WORKSPACE = 2
"""So many of the largest value that the step has saved are left free for what its ops take beside their results."""


class KeepWhileRoom(SwapEach):
    """State: what was kept since the last look at the room, and whether there was too little of it.

    What was kept stays where it is. From the first save without room on each value is swapped at its own save.

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
        room_bytes = self._room() - WORKSPACE * self._largest
        self._since_look, self._until_look = 0, int(room_bytes * SHARE_BETWEEN_LOOKS)
        return room_bytes > 0
