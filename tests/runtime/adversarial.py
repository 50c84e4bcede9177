"""The adversarial device: every copy runs as late as the events allow, and what nobody may look at is not a number.

Compute is the calling thread, as on the CPU device; the two copy streams only keep what is queued. A copy runs when the
compute stream waits for an event behind it, and not before. So a missing wait shows as NaN on any machine, and a
storage that is let go while a copy of it is queued is noted: on a GPU the allocator would have handed it out by then.

What a copy must not do *early* is told by a clock of ops: a copy whose stream was not told to wait for what compute had
queued by then may have run before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poochplan.runtime.devices.cpu import ComputesWhenCalled
from poochplan.runtime.devices.device import Interval
from poochplan.runtime.devices.pinned import PinnedTier
from poochplan.torch_private.compiler_internals import dispatch_hidden_from_compiler

POISON = 0xFF
"""A byte that makes every floating-point type NaN, and an integer -1."""
MAP_NORESERVE = 0x4000
MOST_HOST_BYTES = 1 << 32
"""Addresses of a device's host tier, which takes memory where it is touched."""


class OpClock(TorchDispatchMode):
    """Counts the ops that compute has queued; on while ``with clock:``."""

    supports_higher_order_operators = True

    sees_poochplan = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch wraps each dispatch twice
        return False

    @dispatch_hidden_from_compiler
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += 1
        return func(*args, **(kwargs or {}))


class ComputeEvent:
    def __init__(self, now: int) -> None:
        self.now = now

    def done(self) -> bool:
        return True


class QueuedEvent:
    def __init__(self, stream: LazyStream, position: int) -> None:
        self.stream = stream
        self.position = position

    def done(self) -> bool:
        return self.stream.ran >= self.position


class LazyJob:
    """A queued copy. Knows its storage without holding it: to hold it is the engine's business."""

    def __init__(
        self, device: AdversarialDevice, storage: torch.UntypedStorage, host_offset: int, *, to_host: bool, fails: bool
    ) -> None:
        self.error: OSError | None = None
        self._fails = fails
        self._device = device
        self._storage = weakref.ref(storage, self._let_go)
        self._offset, self._size_bytes, self._to_host = host_offset, storage.nbytes(), to_host
        self._pending = True

    def _let_go(self, _: object) -> None:
        if self._pending:
            verb = "read from" if self._to_host else "written to"
            self._device.violations.append(f"{self._size_bytes} bytes were let go while they could still be {verb}")

    def run(self) -> None:
        self._pending = False
        storage = self._storage()
        if self._fails:
            self.error = OSError(errno.EIO, "Input/output error")
            return
        moved = 0
        for host, count in self._device.host_parts(self._offset, self._size_bytes):
            if storage is None:
                ctypes.memset(host, POISON, count)
            elif self._to_host:
                ctypes.memmove(host, storage.data_ptr() + moved, count)
            else:
                ctypes.memmove(storage.data_ptr() + moved, host, count)
            moved += count


class LazyStream:
    """Keeps what is queued until somebody waits for it."""

    def __init__(self) -> None:
        self.items: list[LazyJob | QueuedEvent] = []
        self.ran = 0
        self.knows_compute_until = -1

    def record(self) -> QueuedEvent:
        return QueuedEvent(self, len(self.items))

    def wait(self, event: Any) -> float:
        if isinstance(event, ComputeEvent):
            self.knows_compute_until = max(self.knows_compute_until, event.now)
        else:
            self.items.append(event)
        return 0.0

    def run_until(self, position: int) -> None:
        while self.ran < position:
            item = self.items[self.ran]
            self.ran += 1
            if isinstance(item, QueuedEvent):
                item.stream.run_until(item.position)
            else:
                item.run()


class AdversarialCompute:
    """The calling thread. To wait for an event is what makes copies run."""

    def __init__(self, clock: OpClock) -> None:
        self.clock = clock

    def record(self) -> ComputeEvent:
        return ComputeEvent(self.clock.now)

    def wait(self, event: Any) -> float:
        if isinstance(event, QueuedEvent):
            event.stream.run_until(event.position)
        return 0.0


class AdversarialDevice(ComputesWhenCalled):
    """Parameters: ``clock``, running while the model trains; ``failing_reads`` and ``failing_writes``, how many of the
    first copies in and out fail.
    """

    def __init__(self, clock: OpClock, *, failing_reads: int = 0, failing_writes: int = 0) -> None:
        self.compute = AdversarialCompute(clock)
        self.outward, self.inward = LazyStream(), LazyStream()
        self.violations: list[str] = []
        self.clock = clock
        self.failing_reads, self.failing_writes = failing_reads, failing_writes
        self._host = mmap.mmap(-1, MOST_HOST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.host_bytes = 0
        """Bytes of it that were used and not released."""
        self._born: dict[int, int] = {}

    def host_parts(self, offset: int, size_bytes: int) -> list[tuple[Any, int]]:
        """Where the bytes at ``offset`` lie, in order: memory, and how many of them."""
        if self.host_bytes < offset + size_bytes:
            self._spoil(self.host_bytes, offset + size_bytes)
            self.host_bytes = offset + size_bytes
        return [((ctypes.c_ubyte * size_bytes).from_buffer(self._host, offset), size_bytes)]

    def _spoil(self, first: int, behind: int) -> None:
        ctypes.memset((ctypes.c_ubyte * 1).from_buffer(self._host, first), POISON, behind - first)

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        storage = torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()
        ctypes.memset(storage.data_ptr(), POISON, size_bytes)
        self._born[storage._cdata] = self.clock.now
        return storage

    def reserve_host(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        """What was there is gone."""
        for host, count in self.host_parts(first, size_bytes):
            ctypes.memset(host, POISON, count)

    def host_view(self, size_bytes: int, first: int) -> torch.Tensor:
        self.host_parts(first, size_bytes)
        return torch.frombuffer(self._host, dtype=torch.uint8, offset=first, count=size_bytes)

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """What lies elsewhere is gone."""
        at = 0
        for first, behind in sorted(taken):
            if at < min(first, self.host_bytes):
                self._spoil(at, min(first, self.host_bytes))
            at = max(at, behind)
        if at < self.host_bytes:
            self._spoil(at, self.host_bytes)
            self.host_bytes = at

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> LazyJob:
        if self.outward.knows_compute_until < self.clock.now:
            self.violations.append("a copy out could start before the value was computed")
        for host, count in self.host_parts(host_offset, storage.nbytes()):
            ctypes.memset(host, POISON, count)
        self.failing_writes -= 1
        job = LazyJob(self, storage, host_offset, to_host=True, fails=self.failing_writes >= 0)
        self.outward.items.append(job)
        return job

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> LazyJob:
        if self.inward.knows_compute_until < self._born.pop(storage._cdata):
            self.violations.append("a copy in could start while earlier ops still used its buffer")
        self.failing_reads -= 1
        job = LazyJob(self, storage, host_offset, to_host=False, fails=self.failing_reads >= 0)
        self.inward.items.append(job)
        return job

    def synchronize(self) -> None:
        for stream in (self.outward, self.inward):
            stream.run_until(len(stream.items))

    def close(self) -> None:
        self.synchronize()


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

    def reserve_host(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        self.tier.reserve(size_bytes, first, lasting=lasting)

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
