"""KeepWhileRoom: a step without a plan, in-core as long as memory has room, and swapped from there on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from poochplan.formats.plan import Decision
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.recorded import StorageRecord

from .driver import NOTHING, Actions
from .swap_each import SwapEach

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
