"""Transfers: every copy between device and host tier, and every wait that makes it safe (engine rule 3).

* A copy out starts after the work queued on the compute stream, so after the value's last writer.
* A copy in starts there too: its new buffer may still be in use by earlier ops.
* Before a copy's storage is released, or its result is used, the compute stream waits for the copy's end. That holds on
  every path, also when a handle dies in an exception or on an unused branch: a dying copy waits.
"""

from __future__ import annotations

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
