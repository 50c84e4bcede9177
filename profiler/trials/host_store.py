"""HostStore: storages in a separate host tier, as copies for comparison with replays.

An operator may write a parameter, a buffer or an input without declaring it (running statistics, a counter), and would
do so again with each replay; neither autograd nor the dispatcher shows it. So while replays are verified the bytes
themselves are kept, compared and, if they differ, restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from poochplan.formats.profile_parts import host_aligned
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.replays.recorded import RecordedOp, StorageRecord, View
from poochplan.runtime.replays.replay import Leaves
from poochplan.runtime.step_policies.step_policy import no_room
from poochplan.tensors.storages import Geometry


class HostStore:
    """Contents of storages in a separate host tier, one after another."""

    def __init__(self, where: torch.device, spill_dir: str | Path | None) -> None:
        self.device: Device = open_device(where, spill_dir)
        self._end_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> int:
        """Copies the storage there, waits, and returns its offset. Raises ``SpillError`` if it cannot be written."""
        offset = self._end_bytes
        self._end_bytes += host_aligned(storage.nbytes())
        copy = copy_out(self.device, storage, offset)
        copy.wait()
        _raise(copy.error, "written")
        return offset

    def get(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A new storage of ``size_bytes`` with the contents stored at ``offset``; raises ``SpillError``."""
        storage = self.device.allocate(size_bytes)
        copy = copy_in(self.device, storage, offset)
        copy.wait()
        _raise(copy.error, "read back")
        return storage

    def close(self) -> None:
        """Releases the host tier."""
        self.device.close()


def _raise(error: OSError | None, what: str) -> None:
    if error is not None:
        raise no_room(error, what) from error


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as a tensor of bytes on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Untouched:
    """Copies of those bytes of storages from before the step that the ops of one replay read.

    They live as long as that replay and hold only the bytes that its ops see. So they amount to the weights of a layer
    or two, even if many tensors share one storage (weights mapped from a file).
    """

    def __init__(self, ops: list[RecordedOp], there: Leaves) -> None:
        self._kept = [(record, part, part.clone()) for record, part in _parts(ops, there)]

    def restore(self) -> list[StorageRecord]:
        """Restores the storages that have changed, and returns them."""
        changed = [(record, part, copy) for record, part, copy in self._kept if not torch.equal(part, copy)]
        for _, part, copy in changed:
            part.copy_(copy)
        return [record for record, _, _ in changed]


def _parts(ops: list[RecordedOp], there: Leaves) -> Iterator[tuple[StorageRecord, torch.Tensor]]:
    """The bytes that the ops see of each earlier storage, in pieces that do not overlap."""
    storages: dict[StorageRecord, torch.UntypedStorage] = {}
    extents: dict[StorageRecord, set[tuple[int, int]]] = {}
    for op in ops:
        for view in op.reads:
            if _was_there(view, op, there):
                storages[view.record] = there[view.record, view.generation]
                extents.setdefault(view.record, set()).add(_extent(view.geometry))
    for record, pieces in extents.items():
        whole = bytes_of(storages[record])
        yield from ((record, whole[begin:end]) for begin, end in _merged(sorted(pieces)))


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, each once."""
    merged: list[tuple[int, int]] = []
    for begin, end in pieces:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _was_there(view: View, op: RecordedOp, there: Leaves) -> bool:
    """Whether it is a part of a storage that the step has not made (or has made where recording could not see it)."""
    return view.record.birth is None and view.record not in op.writes and (view.record, view.generation) in there


def _extent(geometry: Geometry) -> tuple[int, int]:
    """First byte on the storage, and the byte after the last."""
    count = 0
    if 0 not in geometry.shape:
        count = 1 + sum((size - 1) * stride for size, stride in zip(geometry.shape, geometry.stride, strict=True))
    return geometry.offset * geometry.dtype.itemsize, (geometry.offset + count) * geometry.dtype.itemsize
