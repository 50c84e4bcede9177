"""The CUDA device: the user's streams compute, two streams copy, and the host tier is one pinned slab."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .device import Event, Stream
from .pinned import PinnedMemory, cupy_or_none
from .report import MemoryPeaks

_TO_DEVICE, _TO_HOST = 1, 2
"""``cudaMemcpyKind``."""


@dataclass(frozen=True)
class CudaEvent:
    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())


@dataclass(frozen=True)
class CudaStream:
    """Waits are queued on the stream; the host is never held up."""

    stream: torch.cuda.Stream

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream.record_event())

    def wait(self, event: Event) -> float:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)
        return 0.0


@dataclass(frozen=True)
class ComputeStream(CudaStream):
    """One of the user's streams. What it waits for all of them wait for: a buffer that is let go returns to the stream
    it was allocated on, which need not be the one that lets it go.
    """

    seen: set[torch.cuda.Stream] = field(compare=False)

    def wait(self, event: Event) -> float:
        assert isinstance(event, CudaEvent)
        for stream in tuple(self.seen):
            stream.wait_event(event.event)
        return 0.0


class CudaCopy:
    """One queued copy; ``error`` when there was no host memory for it."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error


class CudaDevice:
    """Two streams and a pinned slab from construction to :meth:`close`.

    Parameters
    ----------
    where: which GPU.

    What a plan did not foresee (a step that left it) goes into pinned pieces behind the slab, one for each value.
    """

    kind = "cuda"

    def __init__(self, where: torch.device) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        self.outward = CudaStream(torch.cuda.Stream(self.where))
        self.inward = CudaStream(torch.cuda.Stream(self.where))
        self._cupy = cupy_or_none()
        self._slab: PinnedMemory | None = None
        self._pieces: dict[int, PinnedMemory] = {}
        self._seen: set[torch.cuda.Stream] = set()

    @property
    def compute(self) -> ComputeStream:
        stream = torch.cuda.current_stream(self.where)
        self._seen.add(stream)
        return ComputeStream(stream, self._seen)

    # -- storages and copies ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.where).untyped_storage()

    def reserve_host(self, size_bytes: int) -> None:
        """Allocates the slab at its exact size."""
        if size_bytes > 0:
            self._slab = PinnedMemory(size_bytes, self._cupy)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> CudaCopy:
        try:
            memory, offset = self._place(host_offset, storage.nbytes())
        except OSError as error:
            return CudaCopy(error)
        if len(self._seen) > 1:  # the value may be of another stream than the one that asks for its copy
            for stream in tuple(self._seen):
                self.outward.stream.wait_stream(stream)
        self._queue(storage, memory, offset, _TO_HOST, self.outward)
        return CudaCopy()

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> CudaCopy:
        memory, offset = self._place(host_offset, storage.nbytes())
        self._queue(storage, memory, offset, _TO_DEVICE, self.inward)
        return CudaCopy()

    def _place(self, host_offset: int, size_bytes: int) -> tuple[PinnedMemory, int]:
        if self._slab is not None and host_offset + size_bytes <= self._slab.size_bytes:
            return self._slab, host_offset
        piece = self._pieces.get(host_offset)
        if piece is None or piece.size_bytes < size_bytes:
            if piece is not None:
                self.synchronize()  # its last reader is gone, but perhaps not its last copy
                piece.free()
            piece = self._pieces[host_offset] = PinnedMemory(size_bytes, self._cupy)
        return piece, 0

    def _queue(
        self, storage: torch.UntypedStorage, memory: PinnedMemory, offset: int, kind: int, stream: CudaStream
    ) -> None:
        size_bytes = storage.nbytes()
        if self._cupy is not None:
            to, source = storage.data_ptr(), memory.pointer + offset
            if kind == _TO_HOST:
                to, source = source, to
            self._cupy.cuda.runtime.memcpyAsync(to, source, size_bytes, kind, stream.stream.cuda_stream)
            return
        with _disable_current_modes(), torch.no_grad(), torch.cuda.stream(stream.stream):
            on_device = torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage)
            on_host = memory.tensor[offset : offset + size_bytes]
            if kind == _TO_DEVICE:
                on_device.copy_(on_host, non_blocking=True)
            else:
                on_host.copy_(on_device, non_blocking=True)

    # -- streams of the user's --------------------------------------------------------------------------------

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Has the current stream wait for the one the storage came back on, and the allocator know of both."""
        now = self.compute
        if home == now:
            return
        now.wait(home.record())
        with _disable_current_modes():
            torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage).record_stream(now.stream)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Inputs may be of any stream of forward, and go back to it: all wait for each other before and after."""
        now = self.compute
        others = [stream for stream in tuple(self._seen) if stream != now.stream]
        for stream in others:
            now.stream.wait_stream(stream)
        try:
            yield
        finally:
            for stream in others:
                stream.wait_stream(now.stream)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """An NVTX range."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    # -- memory -----------------------------------------------------------------------------------------------

    def start_peaks(self) -> None:
        """Begins new peaks of the caching allocator, without what it keeps of earlier steps."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.where)

    def peaks(self) -> MemoryPeaks:
        return MemoryPeaks(
            allocated_bytes=torch.cuda.max_memory_allocated(self.where),
            reserved_bytes=torch.cuda.max_memory_reserved(self.where),
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def close(self) -> None:
        self.synchronize()
        for memory in (self._slab, *self._pieces.values()):
            if memory is not None:
                memory.free()
        self._slab, self._pieces = None, {}


@contextlib.contextmanager
def hard_cap(where: torch.device, cap_bytes: int) -> Iterator[None]:
    """Within the block the caching allocator takes no more than ``cap_bytes`` of the GPU: more is out of memory."""
    total_bytes = torch.cuda.get_device_properties(where).total_memory
    before = torch.cuda.get_per_process_memory_fraction(where)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), where)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, where)
