"""Late writes: saved values and sources that a step writes after they were saved, past the dispatcher.

Autograd would use what was written, and a copy on the host has what was saved. Neither a version counter nor a recorded
op shows such a write, for example through ``numpy()``. So contents are summed when they are saved, and once more when
no other code can write them any longer, or when backward first uses them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.replay import run_ops, source_of
from poochplan.tensors.storages import bytes_of
from poochplan.torch_private.tensor_internals import holders_of, without_modes

PIECE_BYTES = 65536
"""Contents are summed and compared in pieces of at least this many bytes; a multiple of 8."""


class LateWrites:
    """State: storages that other code may still write before their first use, each with its checksum. One that only
    this class holds is let go at the next save or use. So a step takes at most one value and its source more.
    """

    def __init__(self) -> None:
        self.values: set[int] = set()
        """Save points of values that were written after they were saved."""
        self.copies: set[int] = set()
        """Save points of copies whose source was written after it was read."""
        self._held: dict[int, list[_Held]] = {}
        """By save point: the value, and the source if it is a copy."""

    def saved(self, index: int, value: SavedValue) -> None:
        """A value is saved at this save point; its storage is still there."""
        self._let_go()
        assert value.storage is not None
        copy_sum = checksum(value.storage)
        held = self._held[index] = [_Held(value.storage, copy_sum, self.values)]
        read = source_of(value.record)
        source = None if read is None else read.record.storage()
        if read is None or source is None or source.nbytes() >= value.size_bytes:
            return
        assert value.record.birth is not None
        there = {(read.record, read.generation): source}
        with without_modes():
            again = run_ops([value.record.birth], there, {value.record}, source.device.type)[value.record]
        if checksum(again) == copy_sum:
            held.append(_Held(source, checksum(source), self.copies))
        else:
            self.copies.add(index)

    def used(self, index: int) -> None:
        """Backward is about to use the value of this save point. Its node may write it from then on."""
        for one in self._held.pop(index, []):
            one.compare(index)
        self._let_go()

    def forget(self) -> None:
        """The step is over, or says nothing any more."""
        self._held.clear()

    def _let_go(self) -> None:
        for index, held in list(self._held.items()):
            for one in [one for one in held if holders_of(one.storage) == 1]:
                one.compare(index)
                held.remove(one)
            if not held:
                del self._held[index]


class _Held(NamedTuple):
    storage: torch.UntypedStorage
    checksum: int
    written: set[int]
    """Gets the save point if the storage was written since."""

    def compare(self, index: int) -> None:
        if checksum(self.storage) != self.checksum:
            self.written.add(index)


def checksum(storage: torch.UntypedStorage) -> int:
    """A number of the contents, in which each eight bytes have another weight in their piece, and each piece has."""
    total = 0
    with without_modes(), torch.no_grad():
        whole = bytes_of(storage)
        weights = torch.arange(1, PIECE_BYTES // 4, 2, device=storage.device)
        for piece in whole.split(PIECE_BYTES):
            words = piece[: len(piece) // 8 * 8].view(torch.int64)
            total = (3 * total + int((words * weights[: len(words)]).sum())) % 2**64
        rest = whole[len(whole) // 8 * 8 :]
        return total + int((rest * weights[: len(rest)]).sum())
