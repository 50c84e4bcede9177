"""Transfers: every copy between device and host tier, and every wait that makes it safe (engine rule 3).

* A copy out starts after the work queued on the compute stream, so after the value's last writer.
* A copy in starts there too: its new buffer may still be in use by earlier ops.
* Before a copy's storage is released, or its result is used, the compute stream waits for the copy's end. That holds on
  every path, also when a handle dies in an exception or on an unused branch: a dying copy waits.
"""

from __future__ import annotations

from typing import Any

import torch

from .device import ComputeDevice, Event, Job


class Copy:
    """One queued copy. Holds its storage until the compute stream has waited for its end."""

    __slots__ = ("_device", "_ended", "_job", "storage")

    def __init__(self, device: ComputeDevice, storage: torch.UntypedStorage, job: Job, ended: Event) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self._device = device
        self._job = job
        self._ended = ended

    @property
    def error(self) -> OSError | None:
        """Why it failed; known once a caller has waited for it."""
        return self._job.error

    def done(self) -> bool:
        """Whether it has ended, with or without success."""
        return self._ended.done()

    def wait(self) -> float:
        """Makes the compute stream wait for it. Returns the seconds for which the calling thread was blocked."""
        held_up_s = self._device.compute.wait(self._ended)
        self.storage = None
        return held_up_s

    def __del__(self) -> None:
        if self.storage is not None:
            self.wait()


def copy_out(device: ComputeDevice, storage: torch.UntypedStorage, host_offset: int) -> Copy:
    """Queues a copy of ``storage`` to the host tier, after the work queued on the compute stream."""
    device.outward.wait(device.compute.record())
    job = device.copy_out(storage, host_offset)
    return Copy(device, storage, job, device.outward.record())


def copy_in(device: ComputeDevice, storage: torch.UntypedStorage, host_offset: int) -> Copy:
    """Queues a copy from the host tier into ``storage``, after the work queued on the compute stream."""
    device.inward.wait(device.compute.record())
    job = device.copy_in(storage, host_offset)
    return Copy(device, storage, job, device.inward.record())


class Transfers:
    """Queues the copies of a device. ``compiled`` does the same by one call, if it is not None and can
    (``replays/native/copies.h``).
    """

    def __init__(self, device: ComputeDevice, compiled: Any = None) -> None:
        self._device, self.compiled = device, compiled

    def out(self, storage: torch.UntypedStorage, host_offset: int) -> Copy:
        found: Copy | None = None if self.compiled is None else self.compiled.out(storage, host_offset)
        return found or copy_out(self._device, storage, host_offset)

    def back(self, size_bytes: int, host_offset: int) -> tuple[torch.UntypedStorage, Copy]:
        """A new storage of the calling thread's stream, and the copy that fills it."""
        found: tuple[torch.UntypedStorage, Copy] | None
        found = None if self.compiled is None else self.compiled.back(size_bytes, host_offset)
        if found is not None:
            return found
        storage = self._device.allocate(size_bytes)
        return storage, copy_in(self._device, storage, host_offset)
