"""The adversarial device with the host tier of the CUDA device: a slab and pages of a few KiB, in ordinary memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from poochplan.runtime.devices.device import Interval
from poochplan.runtime.devices.pinned import PinnedTier
from tests.runtime.adversarial import POISON, AdversarialDevice, LazyJob, OpClock


class OrdinaryMemory:
    """Stands in for pinned memory. ``taken`` is what is not given back yet."""

    def __init__(self, size_bytes: int, taken: list[OrdinaryMemory]) -> None:
        self.size_bytes = size_bytes
        self.content = (ctypes.c_ubyte * size_bytes)()
        ctypes.memset(self.content, POISON, size_bytes)
        self._taken = taken
        taken.append(self)

    def free(self) -> None:
        ctypes.memset(self.content, POISON, self.size_bytes)
        self._taken.remove(self)


def pinned_bytes(tier: PinnedTier) -> int:
    """Bytes of all pieces of the tier."""
    return sum(piece.behind - piece.first for piece in tier._pieces)


class FailedJob:
    def __init__(self, error: OSError) -> None:
        self.error = error


class PagedDevice(AdversarialDevice):
    """Parameters: ``limit_bytes``, the most for all pages; ``page_bytes``, the size of one."""

    def __init__(self, clock: OpClock, *, limit_bytes: int | None = None, page_bytes: int = 10_000) -> None:
        super().__init__(clock)
        self.taken: list[OrdinaryMemory] = []
        self.tier = PinnedTier(
            lambda size_bytes: OrdinaryMemory(size_bytes, self.taken), limit_bytes=limit_bytes, page_bytes=page_bytes
        )

    def host_parts(self, offset: int, size_bytes: int) -> list[tuple[Any, int]]:
        return [
            ((ctypes.c_ubyte * part.size_bytes).from_buffer(part.memory.content, part.offset), part.size_bytes)
            for part in self.tier.parts(offset, size_bytes)
        ]

    def reserve_host(self, size_bytes: int, first: int = 0) -> None:
        self.tier.reserve(size_bytes, first)

    def trim_host(self, taken: Sequence[Interval]) -> None:
        self.synchronize()
        self.tier.trim(taken)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Any:
        try:
            return super().copy_out(storage, host_offset)
        except OSError as error:
            return FailedJob(error)

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> LazyJob:
        self.host_parts(host_offset, storage.nbytes())
        return super().copy_in(storage, host_offset)

    def close(self) -> None:
        super().close()
        self.tier.free()


@contextlib.contextmanager
def paged(**options: int) -> Iterator[PagedDevice]:
    """One whose clock runs; afterwards nothing was wrong, and all memory is given back."""
    clock = OpClock()
    device = PagedDevice(clock, **options)
    with clock:
        yield device
    assert device.violations == []
    assert device.taken == []
