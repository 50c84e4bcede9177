"""The device protocol: all that the engine knows of a machine."""

from __future__ import annotations

from typing import Protocol

import torch


class Copy(Protocol):
    """One queued copy between a device storage and the host tier."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> float:
        """Makes the compute stream wait for it; seconds the calling thread was held up."""

    @property
    def error(self) -> OSError | None:
        """Why it failed; None while it runs and when it went well."""


class Device(Protocol):
    """Queues of copies, one per direction, first in first out, beside the compute stream."""

    kind: str

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """A device storage of exactly ``size_bytes``, contents undefined."""

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Copy:
        """Queues a copy of the whole storage to the host tier. The storage is held until it has ended."""

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> Copy:
        """Queues a copy of the whole storage from the host tier. The storage is held until it has ended."""

    def close(self) -> None:
        """Ends the queues and gives the host tier back. Idempotent."""
