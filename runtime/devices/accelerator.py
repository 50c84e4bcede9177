"""The generic device of an accelerator: the user's streams compute, two streams copy, and the host tier is pinned
memory.

It is built on torch's own protocol for all types of device (:mod:`.backend`). CUDA's device is this one, with CUDA's
own way to pin and to queue copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from poochplan.runtime.messages import warn_once
from poochplan.runtime.run_report import MemoryPeaks
from poochplan.tensors.storages import new_storage
from poochplan.torch_private.tensor_internals import unseen_by_modes, without_modes

from .backend import backend_of
from .device import DeviceStopwatch, Event, Interval, Stream
from .high_water import high_water
from .pinned import MOST_AHEAD, Part, PinnedByTorch, PinnedTier

TO_DEVICE, TO_HOST = 1, 2
"""Ways of a copy, numbered as ``cudaMemcpyKind`` is."""
_RETRIES = "num_alloc_retries"


class SpareEvents(list[torch.Event]):
    """Events of a device that are no longer used; making one takes some microseconds."""

    def __init__(self, make: Callable[[], torch.Event]) -> None:
        super().__init__()
        self.make = make


class QueuedEvent(msgspec.Struct, gc=False, eq=False):
    """One recording. Code that may still query it holds this object. After its death the event is reused: a queued wait
    waits for the recording that was current when it was queued.
    """

    event: torch.Event
    spare: SpareEvents

    def __del__(self) -> None:
        self.spare.append(self.event)

    def done(self) -> bool:
        return bool(self.event.query())


class QueueStream:
    """Waits are queued on the stream; the host is never blocked."""

    __slots__ = ("spare", "stream")

    def __init__(self, stream: torch.Stream, spare: SpareEvents) -> None:
        self.stream = stream
        self.spare = spare

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueStream) and (self.stream is other.stream or self.stream == other.stream)

    __hash__ = None  # type: ignore[assignment]

    def record(self) -> QueuedEvent:
        try:
            event = self.spare.pop()
        except IndexError:
            event = self.spare.make()
        event.record(self.stream)
        return QueuedEvent(event, self.spare)

    def wait(self, event: Event) -> float:
        assert isinstance(event, QueuedEvent)
        self.stream.wait_event(event.event)
        return 0.0


class SeenStreams(dict[int, torch.Stream]):
    """The user's streams to which live values or copies may belong, by address. Only these values and copies keep them
    here, so a stream that is gone is not waited for ever after.
    """


class ComputeStream(QueueStream):
    """One of the user's streams. All of them wait for what one waits for: a released buffer returns to the stream on
    which it was allocated, which may differ from the one that releases it.
    """

    __slots__ = ("__weakref__", "address", "queued", "seen")

    def __init__(self, stream: torch.Stream, address: int, spare: SpareEvents, seen: SeenStreams) -> None:
        super().__init__(stream, spare)
        self.address = address
        self.seen = seen
        self.queued = QueuedCopy(seen)
        """Stands for any copy that could be queued."""

    def wait(self, event: Event) -> float:
        assert isinstance(event, QueuedEvent)
        for stream in tuple(self.seen.values()):
            stream.wait_event(event.event)
        return 0.0


class QueuedCopy:
    """One queued copy; ``error`` is set if there was no host memory for it."""

    __slots__ = ("_seen", "error")

    def __init__(self, seen: SeenStreams, error: OSError | None = None) -> None:
        self.error = error
        self._seen = seen  # a wait for its end is a wait for all of these


class AcceleratorDevice:
    """Two streams and the pinned host tier, from construction to :meth:`close`.

    Parameters
    ----------
    where: which device.
    host_limit_bytes: the most pinned memory for values without a place in the plan (in a step that diverged); see
        :class:`~.pinned.PinnedTier` for the default.
    spans: whether copies and replays are to be named, for a timeline; only CUDA's device names them.
    """

    memcpy_address = 0
    """Of the function that queues a copy between pinned memory and a stream, if compiled code may call it."""

    def __init__(self, where: torch.device, *, host_limit_bytes: int | None = None, spans: bool = False) -> None:
        self._backend = backend_of(where)
        self.where = self._backend.where
        self.kind = self.where.type
        self.spans = spans
        self._index = self._backend.index
        self._marks = high_water(self.kind)
        self._counted = self._counted_bytes()
        self._spare = SpareEvents(self._backend.new_event)
        self.outward = QueueStream(self._backend.new_stream(), self._spare)
        self.inward = QueueStream(self._backend.new_stream(), self._spare)
        self.host_tier = "pinned"
        self._host = PinnedTier(self._pinner(), limit_bytes=host_limit_bytes, most_ahead=MOST_AHEAD)
        self.parts = self._host.parts
        """The pinned memory of so many bytes from an offset of the host tier on; raises ``OSError``."""
        self._streams: weakref.ref[SeenStreams] | None = None
        self._latest: weakref.ref[ComputeStream] | None = None
        self._peaks = MemoryPeaks(allocated_bytes=0, reserved_bytes=0)
        """Peaks from before the step."""
        self._retries = 0
        """The allocator's retries before the peaks began."""
        self._step_retries = 0
        """Those before the step."""
        self._lock = threading.RLock()  # the end of a copy may take it on any thread, also inside this block

    def _pinner(self) -> Callable[[int], Any]:
        """Pins that many bytes; raises ``OSError``."""
        return lambda size_bytes: PinnedByTorch(size_bytes, self._not_pinned)

    def _counted_bytes(self) -> str:
        """The statistic that gives a step's peak: of requested bytes, if the allocator counts them."""
        asked = self._backend.statistics().get("requested_bytes", {}).get("all", {})
        return "requested_bytes" if asked.get("allocated") or asked.get("peak") else "allocated_bytes"

    def _not_pinned(self, reason: str) -> None:
        """The driver refused; ordinary memory takes its place."""
        self.host_tier = "pageable"
        warn_once(
            f"host memory could not be pinned ({reason}): swapped values lie in pageable memory instead, so their "
            "copies are slower and hold up the launching thread; raise the limit of locked memory (ulimit -l)"
        )

    @property
    def compute(self) -> ComputeStream:
        address = self._backend.current_address()
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.address == address:
            return latest
        seen = self._seen()
        stream = seen.get(address)
        if stream is None:  # asking torch for it takes many times as long
            stream = seen[address] = self._backend.current_stream()
        latest = ComputeStream(stream, address, self._spare, seen)
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

    def stopwatch(self) -> DeviceStopwatch:
        return DeviceStopwatch(self._backend.current_stream, lambda: self._backend.new_event(timed=True))

    # -- storages and copies ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return new_storage(size_bytes, self.where)

    def reserve_host(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        """Pins those bytes that are not pinned, at their exact size."""
        self._host.reserve(size_bytes, first, lasting=lasting)

    def host_view(self, size_bytes: int, first: int) -> torch.Tensor:
        """The pinned memory itself, which is then released with the last tensor on it.

        It is a storage of its own, because torch saves and copies whole storages.
        """
        part, *others = self.parts(first, size_bytes)
        if others:
            raise OSError(errno.ENOMEM, "the bytes lie in several pieces of pinned memory")
        buffer: Any = (ctypes.c_ubyte * size_bytes).from_address(part.memory.tensor.data_ptr() + part.offset)
        buffer.owner = part.memory.tensor
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """Blocks the calling thread if there is memory to release: copies of the dead values there may still run."""
        self._host.forget_ahead()
        if self._host.idle(taken):
            self.synchronize()
            with self._backend.here():
                self._host.trim(taken)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> QueuedCopy:
        compute = self.compute
        seen = compute.seen
        try:
            parts = self.parts(host_offset, storage.nbytes())
        except OSError as error:
            return QueuedCopy(seen, error)
        if len(seen) > 1:  # the value may belong to another stream than the one that requests its copy
            for stream in tuple(seen.values()):
                self.outward.stream.wait_stream(stream)
        self._queue(storage, parts, TO_HOST, self.outward)
        return compute.queued

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> QueuedCopy:
        parts = self.parts(host_offset, storage.nbytes())
        self._queue(storage, parts, TO_DEVICE, self.inward)
        return self.compute.queued

    def read(self, storage: torch.UntypedStorage, host_offset: int) -> None:
        self.synchronize()
        parts = self.parts(host_offset, storage.nbytes())
        with without_modes():
            whole, at = torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage), 0
            for part in parts:
                whole[at : at + part.size_bytes].copy_(part.memory.tensor[part.offset : part.offset + part.size_bytes])
                at += part.size_bytes

    def _queue(self, storage: torch.UntypedStorage, parts: list[Part], kind: int, stream: QueueStream) -> None:
        with unseen_by_modes(), self._backend.on(stream.stream):
            whole = torch.empty(0, dtype=torch.uint8, device=self.where).set_(storage)
            at = 0
            for part in parts:
                on_device = whole if len(parts) == 1 else whole[at : at + part.size_bytes]
                on_host = part.memory.tensor[part.offset : part.offset + part.size_bytes]
                if kind == TO_DEVICE:
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

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """No name: torch has no protocol for that."""
        return contextlib.nullcontext()

    # -- memory -----------------------------------------------------------------------------------------------

    def start_peaks(self) -> None:
        """Starts new peaks of the caching allocator, without memory that it caches from earlier steps."""
        self._backend.empty_cache()
        self._peaks = MemoryPeaks(allocated_bytes=0, reserved_bytes=0)
        self._retries = self._marks.count(self._index, _RETRIES)
        self._marks.begin(self._index)

    def start_step_peak(self) -> None:
        self._peaks = self.peaks()
        self._step_retries = self._marks.count(self._index, _RETRIES)
        self._marks.begin(self._index)

    def step_peak_bytes(self) -> int:
        """Most requested bytes, if the allocator counts requests; a block that it hands out may be larger by a MiB."""
        return self._marks.since_begin(self._index, self._counted)

    def step_reserved_bytes(self) -> int:
        return self._marks.since_begin(self._index, "reserved_bytes")

    def step_retries(self) -> int:
        return self._marks.count(self._index, _RETRIES) - self._step_retries

    def let_go_of_cache(self) -> None:
        self._backend.empty_cache()

    def peaks(self) -> MemoryPeaks:
        now = self._marks
        return MemoryPeaks(
            allocated_bytes=max(self._peaks.allocated_bytes, now.since_begin(self._index, "allocated_bytes")),
            reserved_bytes=max(self._peaks.reserved_bytes, now.since_begin(self._index, "reserved_bytes")),
            retries=now.count(self._index, _RETRIES) - self._retries,
        )

    def synchronize(self) -> None:
        self._backend.synchronize()

    def close(self) -> None:
        self.synchronize()
        with self._backend.here():
            self._host.free()
