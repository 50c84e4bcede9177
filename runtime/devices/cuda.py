"""The CUDA device: the user's streams compute, two streams copy, and the host tier is pinned memory.

High water: the allocator has one mark of each kind, and whoever resets it does so for all. So the marks are kept here
before a reset, and every public call of torch that reads them returns the higher of the two: peaks of single steps
change no peak that the user reads. A reset by the user ends that.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from poochplan.errors import UsageError
from poochplan.guard import users
from poochplan.runtime.messages import warn_once
from poochplan.runtime.run_report import MemoryPeaks
from poochplan.tensors.modes import compiled_modules
from poochplan.tensors.storages import new_storage
from poochplan.torch_private.compiler_internals import captures_graphs
from poochplan.torch_private.cuda_internals import (
    MemoryStats,
    ResetPeaks,
    memory_stats_calls,
    raw_stream,
    stand_before_memory_stats,
)
from poochplan.torch_private.tensor_internals import unseen_by_modes, without_modes

from .device import CudaStopwatch, Event, Interval, Stream
from .pinned import (
    MOST_AHEAD,
    Part,
    PinnedMemory,
    PinnedTier,
    cupy_or_none,
    fitting_cupy,
    memcpy_async,
    processors_near,
)

_TO_DEVICE, _TO_HOST = 1, 2
"""``cudaMemcpyKind``."""
_RETRIES = "num_alloc_retries"
Marks = dict[tuple[str, str], int]
"""By statistic and pool, such as ("allocated_bytes", "all")."""


class CudaEvent(msgspec.Struct, gc=False, eq=False):
    """One recording. Code that may still query it holds this object. After its death the event is reused: a queued wait
    waits for the recording that was current when it was queued.
    """

    event: torch.cuda.Event
    spare: list[torch.cuda.Event]

    def __del__(self) -> None:
        self.spare.append(self.event)

    def done(self) -> bool:
        return bool(self.event.query())


class CudaStream:
    """Waits are queued on the stream; the host is never blocked."""

    __slots__ = ("spare", "stream")

    def __init__(self, stream: torch.cuda.Stream, spare: list[torch.cuda.Event]) -> None:
        self.stream = stream
        self.spare = spare
        """Events of this device that are no longer used; making one takes some microseconds."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and (self.stream is other.stream or self.stream == other.stream)

    __hash__ = None  # type: ignore[assignment]

    def record(self) -> CudaEvent:
        try:
            event = self.spare.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event, self.spare)

    def wait(self, event: Event) -> float:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)
        return 0.0


class SeenStreams(dict[int, torch.cuda.Stream]):
    """The user's streams to which live values or copies may belong, by address. Only these values and copies keep them
    here, so a stream that is gone is not waited for ever after.
    """


class ComputeStream(CudaStream):
    """One of the user's streams. All of them wait for what one waits for: a released buffer returns to the stream on
    which it was allocated, which may differ from the one that releases it.
    """

    __slots__ = ("__weakref__", "address", "queued", "seen")

    def __init__(self, stream: torch.cuda.Stream, spare: list[torch.cuda.Event], seen: SeenStreams) -> None:
        super().__init__(stream, spare)
        self.address = int(stream.cuda_stream)
        self.seen = seen
        self.queued = CudaCopy(seen)
        """Stands for any copy that could be queued."""

    def wait(self, event: Event) -> float:
        assert isinstance(event, CudaEvent)
        for stream in tuple(self.seen.values()):
            stream.wait_event(event.event)
        return 0.0


class CudaCopy:
    """One queued copy; ``error`` is set if there was no host memory for it."""

    __slots__ = ("_seen", "error")

    def __init__(self, seen: SeenStreams, error: OSError | None = None) -> None:
        self.error = error
        self._seen = seen  # a wait for its end is a wait for all of these


class CudaDevice:
    """Two streams and the pinned host tier, from construction to :meth:`close`.

    Parameters
    ----------
    where: which GPU.
    host_limit_bytes: the most pinned memory for values without a place in the plan (in a step that diverged); see
        :class:`~.pinned.PinnedTier` for the default.
    spans: name each copy and replay in an NVTX range, for Nsight Systems; this takes some microseconds each.
    """

    kind = "cuda"

    def __init__(self, where: torch.device, *, host_limit_bytes: int | None = None, spans: bool = False) -> None:
        self.where = with_index(where)
        self.spans = spans
        self._index = self.where.index
        self._counted = _counted_bytes()
        self._spare: list[torch.cuda.Event] = []
        self.outward = CudaStream(torch.cuda.Stream(self.where), self._spare)
        self.inward = CudaStream(torch.cuda.Stream(self.where), self._spare)
        cupy = fitting_cupy(cupy_or_none(), self.where)
        self._memcpy = memcpy_async(cupy)
        near = processors_near(self.where)

        def pin(size_bytes: int) -> PinnedMemory:
            with torch.cuda.device(self.where):  # otherwise an unused GPU would get a context
                return PinnedMemory(size_bytes, cupy, near, self._not_pinned)

        self.host_tier = "pinned"
        self._host = PinnedTier(pin, limit_bytes=host_limit_bytes, most_ahead=MOST_AHEAD)
        self._streams: weakref.ref[SeenStreams] | None = None
        self._latest: weakref.ref[ComputeStream] | None = None
        self._peaks = MemoryPeaks(allocated_bytes=0, reserved_bytes=0)
        """Peaks from before the step."""
        self._retries = 0
        """The allocator's retries before the peaks began."""
        self._step_retries = 0
        """Those before the step."""
        self._lock = threading.RLock()  # the end of a copy may take it on any thread, also inside this block

    def _not_pinned(self, reason: str) -> None:
        """The driver refused; ordinary memory takes its place."""
        self.host_tier = "pageable"
        warn_once(
            f"host memory could not be pinned ({reason}): swapped values lie in pageable memory instead, so their "
            "copies are slower and hold up the launching thread; raise the limit of locked memory (ulimit -l)"
        )

    @property
    def compute(self) -> ComputeStream:
        address = raw_stream(self._index)
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.address == address:
            return latest
        seen = self._seen()
        stream = seen.get(address)
        if stream is None:  # asking torch for it takes many times as long
            stream = seen[address] = torch.cuda.current_stream(self.where)
        latest = ComputeStream(stream, self._spare, seen)
        self._latest = weakref.ref(latest)
        return latest

    def _seen(self) -> SeenStreams:
        """The streams seen since any value or copy was last alive."""
        with self._lock:
            seen = self._streams() if self._streams is not None else None
            if seen is None:
                seen = SeenStreams()
                self._streams = weakref.ref(seen)
            return seen

    def stopwatch(self) -> CudaStopwatch:
        return CudaStopwatch(lambda: torch.cuda.current_stream(self.where))

    # -- storages and copies ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return new_storage(size_bytes, self.where)

    def reserve_host(self, size_bytes: int, first: int = 0) -> None:
        """Pins those bytes that are not pinned, at their exact size."""
        self._host.reserve(size_bytes, first)

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """Blocks the calling thread if there is memory to release: copies of the dead values there may still run."""
        self._host.forget_ahead()
        if self._host.idle(taken):
            self.synchronize()
            with torch.cuda.device(self.where):
                self._host.trim(taken)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> CudaCopy:
        compute = self.compute
        seen = compute.seen
        try:
            parts = self._host.parts(host_offset, storage.nbytes())
        except OSError as error:
            return CudaCopy(seen, error)
        if len(seen) > 1:  # the value may belong to another stream than the one that requests its copy
            for stream in tuple(seen.values()):
                self.outward.stream.wait_stream(stream)
        self._queue(storage, parts, _TO_HOST, self.outward)
        return compute.queued

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> CudaCopy:
        parts = self._host.parts(host_offset, storage.nbytes())
        self._queue(storage, parts, _TO_DEVICE, self.inward)
        return self.compute.queued

    def read(self, storage: torch.UntypedStorage, host_offset: int) -> None:
        torch.cuda.synchronize(self.where)
        parts = self._host.parts(host_offset, storage.nbytes())
        with without_modes():
            whole, at = torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage), 0
            for part in parts:
                whole[at : at + part.size_bytes].copy_(part.memory.tensor[part.offset : part.offset + part.size_bytes])
                at += part.size_bytes

    def _queue(self, storage: torch.UntypedStorage, parts: list[Part], kind: int, stream: CudaStream) -> None:
        if self._memcpy is not None:
            at = storage.data_ptr()
            for memory, offset, size_bytes in parts:
                host = memory.pointer + offset
                to, source = (host, at) if kind == _TO_HOST else (at, host)
                self._memcpy(to, source, size_bytes, kind, stream.stream.cuda_stream)
                at += size_bytes
            return
        with unseen_by_modes(), torch.cuda.stream(stream.stream):
            whole = torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage)
            at = 0
            for part in parts:
                on_device = whole if len(parts) == 1 else whole[at : at + part.size_bytes]
                on_host = part.memory.tensor[part.offset : part.offset + part.size_bytes]
                if kind == _TO_DEVICE:
                    on_device.copy_(on_host, non_blocking=True)
                else:
                    on_host.copy_(on_device, non_blocking=True)
                at += part.size_bytes

    # -- the user's streams -----------------------------------------------------------------------------------

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Makes the current stream wait for the one on which the storage came back; tells the allocator about both."""
        now = self.compute
        if home is now or home == now:
            return
        now.wait(home.record())
        with without_modes():
            torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage).record_stream(now.stream)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """All streams wait for each other before and after: inputs and results may belong to any stream of forward."""
        now = self.compute
        others = [stream for stream in tuple(now.seen.values()) if stream != now.stream]
        for stream in others:
            now.stream.wait_stream(stream)
        try:
            yield
        finally:
            for stream in others:
                stream.wait_stream(now.stream)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """An NVTX range; the engine asks for it if ``spans`` is true."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    # -- memory -----------------------------------------------------------------------------------------------

    def start_peaks(self) -> None:
        """Starts new peaks of the caching allocator, without memory that it caches from earlier steps."""
        torch.cuda.empty_cache()
        self._peaks = MemoryPeaks(allocated_bytes=0, reserved_bytes=0)
        self._retries = high_water().count(self._index, _RETRIES)
        high_water().begin(self._index)

    def start_step_peak(self) -> None:
        self._peaks = self.peaks()
        self._step_retries = high_water().count(self._index, _RETRIES)
        high_water().begin(self._index)

    def step_peak_bytes(self) -> int:
        """Most requested bytes, if the allocator counts requests; a block that it hands out may be larger by a MiB."""
        return high_water().since_begin(self._index, self._counted)

    def step_reserved_bytes(self) -> int:
        return high_water().since_begin(self._index, "reserved_bytes")

    def step_retries(self) -> int:
        return high_water().count(self._index, _RETRIES) - self._step_retries

    def let_go_of_cache(self) -> None:
        with torch.cuda.device(self.where):
            torch.cuda.empty_cache()

    def peaks(self) -> MemoryPeaks:
        now = high_water()
        return MemoryPeaks(
            allocated_bytes=max(self._peaks.allocated_bytes, now.since_begin(self._index, "allocated_bytes")),
            reserved_bytes=max(self._peaks.reserved_bytes, now.since_begin(self._index, "reserved_bytes")),
            retries=now.count(self._index, _RETRIES) - self._retries,
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def close(self) -> None:
        self.synchronize()
        with torch.cuda.device(self.where):
            self._host.free()


def with_index(where: torch.device) -> torch.device:
    """``cuda`` with the index of the current device, because some calls require it."""
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


def _counted_bytes() -> str:
    """The statistic that gives a step's peak. Raises ``UsageError`` for an allocator that keeps none."""
    backend = torch.cuda.get_allocator_backend()
    if backend == "native":
        return "requested_bytes"
    if backend == "cudaMallocAsync":  # CUDA counts the bytes that its own pool hands out, which are those requested
        return "allocated_bytes"
    raise UsageError(
        f"allocator: expected torch's own (native or cudaMallocAsync), which tells what a step takes, found {backend}; "
        "run without torch.cuda.memory.change_current_allocator"
    )


# -- CUDA graphs: their addresses never change, but a plan releases memory and gets other -----------------------------


def refuse_graphs(model: torch.nn.Module) -> None:
    """Raises ``UsageError`` for a model with compiled parts that run as CUDA graphs."""
    for path, module in compiled_modules(model).items():
        if captures_graphs(module):
            raise UsageError(
                f"model: expected compiled modules without CUDA graphs, found {path or 'the model'} with "
                'mode="reduce-overhead"; compile it with mode="default" or "max-autotune-no-cudagraphs"'
            )


def refuse_capture() -> None:
    """Raises ``UsageError`` if the current stream records a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise users(
            UsageError(
                "CUDA graph: expected steps that run op by op inside a session, found one that is being captured; "
                "capture it before the session or in session.away()"
            )
        )


@contextlib.contextmanager
def hard_cap(where: torch.device, cap_bytes: int) -> Iterator[None]:
    """A block in which the caching allocator takes at most ``cap_bytes``; a request beyond that is out of memory."""
    where = with_index(where)
    total_bytes = torch.cuda.get_device_properties(where).total_memory
    before = torch.cuda.get_per_process_memory_fraction(where)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), where)
    try:
        yield
    finally:  # without a limit, cudaMallocAsync reports a share far above 1, which it does not take
        torch.cuda.set_per_process_memory_fraction(min(1.0, before), where)


class HighWater:
    """State: for each GPU, the height of each mark before it was reset here: of all time, and since the step began.

    Parameters
    ----------
    stats, reset: torch's own calls, by the number of a GPU.
    of_accelerator: that of ``torch.accelerator``, which reads the same marks.
    """

    def __init__(self, stats: MemoryStats, reset: ResetPeaks, of_accelerator: MemoryStats) -> None:
        self._stats, self._reset, self._of_accelerator = stats, reset, of_accelerator
        self._kept: dict[int, Marks] = {}
        self._of_step: dict[int, Marks] = {}
        self._lock = threading.RLock()

    def stats(self, index: int) -> dict[str, Any]:
        """The statistics that the user reads, as if nothing had been reset here."""
        with self._lock:
            return _raised(self._stats(index), self._kept.get(index, {}))

    def accelerator_stats(self, index: int) -> dict[str, Any]:
        """The same for ``torch.accelerator``."""
        with self._lock:
            return _raised(self._of_accelerator(index), self._kept.get(index, {}))

    def reset(self, index: int) -> None:
        """The user resets the marks; those of the step stay."""
        with self._lock:
            self.begin_part(index)
            self._kept.pop(index, None)

    def begin(self, index: int) -> None:
        """A step begins: its peaks are separated from all before."""
        with self._lock:
            self.begin_part(index)
            self._of_step.pop(index, None)

    def begin_part(self, index: int) -> None:
        """A part of a step begins, such as an op that is measured; the step's marks and the user's stay."""
        with self._lock:
            now = {
                (name, pool): int(mark["peak"])
                for name, pools in self._stats(index).items()
                if isinstance(pools, dict)
                for pool, mark in pools.items()
                if isinstance(mark, dict) and "peak" in mark
            }
            for kept in (self._kept, self._of_step):
                before = kept.get(index, {})
                kept[index] = {of: max(peak_bytes, before.get(of, 0)) for of, peak_bytes in now.items()}
            self._reset(index)

    def since_begin(self, index: int, name: str) -> int:
        """The most of that statistic since the last :meth:`begin`."""
        with self._lock:
            return max(int(self._stats(index)[name]["all"]["peak"]), self._of_step.get(index, {}).get((name, "all"), 0))

    def of_part(self, index: int, name: str) -> tuple[int, int]:
        """That statistic now, and its most since the last :meth:`begin_part`."""
        found = self._stats(index)[name]["all"]
        return int(found["current"]), int(found["peak"])

    def count(self, index: int, name: str) -> int:
        """How often an event has happened; 0 if this allocator does not count it."""
        return int(self._stats(index).get(name, 0))


def _raised(stats: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """The same statistics, with no mark lower than given."""
    for (name, pool), peak_bytes in marks.items():
        mark = stats.get(name, {}).get(pool)
        if mark is not None:
            mark["peak"] = max(mark["peak"], peak_bytes)
    return stats


_LOCK = threading.Lock()
_installed: HighWater | None = None


def high_water() -> HighWater:
    """The object of this process. It stays in front of torch's calls, for the user may read the marks long after."""
    global _installed
    with _LOCK:
        if _installed is None or memory_stats_calls()[0] != _installed.stats:
            _installed = HighWater(*memory_stats_calls())
            stand_before_memory_stats(_installed.stats, _installed.reset, _installed.accelerator_stats)
        return _installed
