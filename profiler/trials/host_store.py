"""HostStore: storages in a host tier of its own, copies to compare replays with, and of a capture that swaps."""

from __future__ import annotations

from pathlib import Path

import torch

from poochplan.formats.plan import host_aligned
from poochplan.profiler.capture.captured import Clone
from poochplan.profiler.capture.cloned import ClonedCapture
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.runtime.devices.device import Device, Stream
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.step_policies.swap_each import no_room
from poochplan.torch_private.tensor_internals import without_modes


class HostStore:
    """Contents of storages in a host tier of its own, one behind the other."""

    def __init__(self, where: torch.device, spill_dir: str | Path | None) -> None:
        self.device: Device = open_device(where, spill_dir)
        self._end_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> int:
        """Copies the storage there and waits; its offset. Raises ``SpillError`` when it cannot be written."""
        offset = self._end_bytes
        self._end_bytes += host_aligned(storage.nbytes())
        copy = copy_out(self.device, storage, offset)
        copy.wait()
        _raise(copy.error, "written")
        return offset

    def get(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A new storage of ``size_bytes`` with what was put at ``offset``; raises ``SpillError``."""
        storage = self.device.allocate(size_bytes)
        copy = copy_in(self.device, storage, offset)
        copy.wait()
        _raise(copy.error, "read back")
        return storage

    def forget(self) -> None:
        """All that was put may be overwritten."""
        self._end_bytes = 0

    def close(self) -> None:
        """Gives the host tier back."""
        self.device.close()


def _raise(error: OSError | None, what: str) -> None:
    if error is not None:
        raise no_room(error, what) from error


class HostedClone(Clone):
    """A copy that lies on the host until backward asks for it."""

    __slots__ = ("home", "offset", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        super().__init__(None)
        self.offset = offset
        self.size_bytes = size_bytes
        self.home: Stream | None = None


class HostedCapture(ClonedCapture):
    """The capture whose copies lie on the host."""

    def __init__(self, where: torch.device, tracker: LayerTracker, static: set[int], store: HostStore) -> None:
        super().__init__(where, tracker, static)
        self._store = store

    def _cloned(self, storage: torch.UntypedStorage, number: int) -> Clone:
        with without_modes():
            return HostedClone(self._store.put(storage), storage.nbytes())

    def _storage_of(self, clone: Clone, number: int) -> torch.UntypedStorage:
        assert isinstance(clone, HostedClone)
        if clone.storage is None:
            with without_modes():
                clone.storage = self._store.get(clone.offset, clone.size_bytes)
            clone.home = self._store.device.compute
            self.lifetimes.is_copied_to(clone.storage, number)
        assert clone.home is not None
        self._store.device.use(clone.storage, clone.home)
        return clone.storage
