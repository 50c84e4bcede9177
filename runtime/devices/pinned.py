"""The host tier of an accelerator: pinned as a whole for a plan, and in pages for values without one.

A plan's bytes are one slab of their exact size, if nothing was pinned before. If a loop has swapped without a plan, its
pages are used unchanged; so is the slab of a smaller plan. Only missing bytes are pinned. So memory that a copy could
still read or write is never released to make room for a plan.

A value may lie on several pieces: it is copied in parts.

Pinning a page takes longer than filling it. So a thread pins pages ahead in the first steps: as many as there are, at
most :data:`MOST_AHEAD`. Unused ones are released together with other pages, or with the tier.

torch's own allocator of pinned memory rounds up to powers of two; CuPy takes the requested size. Without CuPy, a
mapping of ordinary memory is registered with the driver (``cudaHostRegister``), which pins it in place.

A page lies on the NUMA node whose processor touches it first. That should be the GPU's node, because otherwise every
copy crosses the link between the processors. So threads on the GPU's node, if it is known, allocate CuPy's memory or
touch a mapping. Several threads touch a mapping, because one writes new pages at only a few GB/s. With huge pages there
are some hundred times fewer faults.

What the driver refuses to pin may be ordinary memory, if the caller asks for that: its copies are slower, and block the
launching thread. Their order on a stream is the same.

No child of a fork gets the mapping (``MADV_DONTFORK``). Otherwise the parent's next write would copy a page, and the
GPU would write to the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from poochplan.errors import named_line
from poochplan.runtime.messages import warn
from poochplan.tensors.host_memory import available_bytes
from poochplan.torch_private.tensor_internals import without_modes
from poochplan.units import format_bytes

from .device import Interval

PAGE_BYTES = 64 << 20
MOST_AHEAD = 8
SHARE_OF_AVAILABLE = 0.75
"""Share of the host memory available when the first page is pinned. All pages take at most this."""
PCI_DEVICES, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
_MOST_THREADS = 8
_LEAST_BYTES_A_THREAD = 16 << 20
_TRIED_BYTES = 4096


class Part(NamedTuple):
    """Bytes of a value in one piece of memory: ``size_bytes`` at ``offset`` of ``memory``."""

    memory: Any
    """A :class:`PinnedMemory`, or what a test has in its place."""
    offset: int
    size_bytes: int


class Piece(NamedTuple):
    """Bytes of the tier that are pinned together: from ``first`` to before ``behind``."""

    first: int
    behind: int
    memory: Any


class PinnedTier:
    """The memory at each offset of the host tier. State: the pinned pieces in order, the bytes prepared for a plan, and
    the pages being pinned ahead.

    Parameters
    ----------
    pin: returns that many bytes of pinned memory; raises ``OSError`` if they are not available.
    most_ahead: pages that a thread may pin ahead.
    limit_bytes: the most that all pages take; None for a share of the available memory (``SHARE_OF_AVAILABLE``).
    """

    def __init__(
        self,
        pin: Callable[[int], Any],
        *,
        limit_bytes: int | None = None,
        page_bytes: int = PAGE_BYTES,
        most_ahead: int = 0,
    ) -> None:
        self._pin = pin
        self._most_ahead = most_ahead
        self._limit_bytes = limit_bytes
        self._page_bytes = page_bytes
        self._pieces: list[Piece] = []
        self._room: Interval = (0, 0)
        self._lasting: list[Interval] = []
        self._pages_pinned = 0
        self._ahead: deque[Future[Any]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def behind_bytes(self) -> int:
        """Bytes of the pieces that do not belong completely to a plan, or to what lasts."""
        rooms = [self._room, *self._lasting]
        return sum(
            one.behind - one.first
            for one in self._pieces
            if not any(first <= one.first and one.behind <= behind for first, behind in rooms)
        )

    def reserve(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        """Pins the missing part of the ``size_bytes`` from ``first`` on, at its exact size: for a plan, in place of the
        plan before, or for what is ``lasting`` beside it. Raises ``OSError``.
        """
        for missing in list(self._missing(first, first + size_bytes)):
            self._add(missing)
        if lasting:
            self._lasting.append((first, first + size_bytes))
            return
        self.forget_ahead()  # few steps of a plan need more
        self._room = (first, first + size_bytes)

    def parts(self, offset: int, size_bytes: int) -> list[Part]:
        """The pieces of memory for the ``size_bytes`` at ``offset``, in order.

        Raises ``OSError`` if pages are missing that cannot be pinned, or that exceed the limit.
        """
        index = self._index(offset)
        if index >= 0:
            piece = self._pieces[index]
            if 0 < size_bytes <= piece.behind - offset:
                return [Part(piece.memory, offset - piece.first, size_bytes)]
        end = offset + size_bytes
        if missing := list(self._missing(offset, end)):
            self._add_pages(missing)
        return list(self._parts(offset, end))

    def _index(self, offset: int) -> int:
        """Index of the last piece that begins at or before ``offset``; -1 if there is none."""
        return bisect_right(self._pieces, offset, key=lambda piece: piece.first) - 1

    def _parts(self, offset: int, end: int) -> Iterator[Part]:
        """The parts of bytes that are all pinned."""
        at, index = offset, self._index(offset)
        while at < end:
            piece = self._pieces[index]
            count = min(piece.behind, end) - at
            yield Part(piece.memory, at - piece.first, count)
            at, index = at + count, index + 1

    def _missing(self, first: int, behind: int) -> Iterator[Interval]:
        """Those of the bytes that are not pinned."""
        at = first
        for piece in self._pieces[max(0, self._index(first)) :]:
            if at < min(piece.first, behind):
                yield at, min(piece.first, behind)
            at = max(at, piece.behind)
        if at < behind:
            yield at, behind

    def _add_pages(self, missing: list[Interval]) -> None:
        """Pins the pages that contain the missing bytes."""
        pages = [page for interval in missing for page in self._pages(*interval)]
        if self._limit_bytes is None:
            self._limit_bytes = int(SHARE_OF_AVAILABLE * available_bytes())
        needed_bytes = self.behind_bytes + sum(behind - first for first, behind in pages)
        if needed_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOMEM,
                f"pinned memory besides the planned is limited to {format_bytes(self._limit_bytes)}, needed "
                f"{format_bytes(needed_bytes)}; free host memory, or raise host_limit_bytes of apply()",
            )
        for page in pages:
            self._add(page)
        self._pages_pinned += len(pages)
        self._pin_ahead()

    def _pages(self, first: int, behind: int) -> Iterator[Interval]:
        """The pages of missing bytes, one after another, from the end of the previous piece to the next one."""
        index = self._index(first)
        start = self._pieces[index].behind if index >= 0 else 0
        end = self._pieces[index + 1].first if index + 1 < len(self._pieces) else None
        at = start + (first - start) // self._page_bytes * self._page_bytes
        while at < behind:
            page_end = at + self._page_bytes
            yield at, page_end if end is None else min(page_end, end)
            at = page_end

    def _add(self, interval: Interval) -> None:
        first, behind = interval
        is_page = behind - first == self._page_bytes
        memory = self._ahead.popleft().result() if is_page and self._ahead else self._pin(behind - first)
        self._pieces.insert(self._index(first) + 1, Piece(first, behind, memory))

    def _pin_ahead(self) -> None:
        """Has the thread pin pages, as the limit allows."""
        assert self._limit_bytes is not None
        allowed = (self._limit_bytes - self.behind_bytes) // self._page_bytes
        wanted = min(self._pages_pinned, self._most_ahead, allowed) - len(self._ahead)
        if wanted > 0 and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="poochplan-pin")
        for _ in range(wanted):
            assert self._thread is not None
            self._ahead.append(self._thread.submit(self._pin, self._page_bytes))

    def forget_ahead(self) -> None:
        """Releases pages that were pinned ahead, on which no value lies. Waits for the page that is being pinned."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        while self._ahead:
            page = self._ahead.popleft()
            if not page.cancelled() and page.exception() is None:
                page.result().free()

    def idle(self, taken: Sequence[Interval]) -> list[Piece]:
        """The pieces that contain none of these intervals."""
        return [
            piece
            for piece in self._pieces
            if not any(first < piece.behind and piece.first < behind for first, behind in taken)
        ]

    def trim(self, taken: Sequence[Interval]) -> None:
        """Releases the pieces that contain none of these intervals; no copy of theirs may be running."""
        for piece in self.idle(taken):
            self._pieces.remove(piece)
            piece.memory.free()

    def free(self) -> None:
        """Releases everything; no copy may be running. Idempotent."""
        self.forget_ahead()
        self.trim(())
        self._room = (0, 0)


def cupy_or_none() -> Any:
    """CuPy, if it is installed and finds a CUDA runtime. If it is installed and does not, one line says so, once."""
    global _is_told
    try:
        import cupy

        cupy.cuda.runtime.runtimeGetVersion()
        return cupy
    except Exception as error:  # an incompatible installation fails in many ways
        is_installed = not (isinstance(error, ModuleNotFoundError) and error.name == "cupy")
        if is_installed and not _is_told:
            _is_told = True
            warn(f"CuPy is installed and cannot be used ({named_line(error)}): {_WITHOUT_CUPY}")
    return None


_is_told = False
_WITHOUT_CUPY = "going on without it; install the one for this CUDA (poochplan[cuda12] or [cuda13]), or none"


@functools.lru_cache(maxsize=4)
def fitting_cupy(cupy: Any, where: torch.device) -> Any:
    """CuPy, if it pins memory and copies to it correctly; else None, and one line says why. It is tried once for each
    GPU.

    A build for another CUDA than the driver's can be imported, and fails at its first call.
    """
    if cupy is None:
        return None
    try:
        with torch.cuda.device(where), without_modes(), torch.no_grad():
            reason = _misfit(cupy, where)
    except Exception as error:  # it fails in many ways
        reason = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
    if not reason:
        return cupy
    what = f"CuPy {cupy.__version__} does not work with this driver and torch {torch.__version__}"
    warn(f"{what} ({reason}): {_WITHOUT_CUPY}")
    return None


def _misfit(cupy: Any, where: torch.device) -> str:
    """What is wrong with a copy that it makes; empty if nothing is."""
    pinned = cupy.cuda.PinnedMemory(_TRIED_BYTES)
    stream = torch.cuda.current_stream(where)
    there = torch.full((_TRIED_BYTES,), 7, dtype=torch.uint8, device=where)
    cupy.cuda.runtime.memcpyAsync(int(pinned.ptr), there.data_ptr(), _TRIED_BYTES, 2, stream.cuda_stream)
    stream.synchronize()
    found = bytes((ctypes.c_ubyte * _TRIED_BYTES).from_address(int(pinned.ptr)))
    return "" if found == bytes([7]) * _TRIED_BYTES else "a copy gave other bytes"


MemcpyAsync = Callable[[int, int, int, int, int], object]
"""``cudaMemcpyAsync(to, source, size_bytes, kind, stream)``, which raises where CUDA refuses."""


def memcpy_async(cupy: Any) -> MemcpyAsync | None:
    """CuPy's function; without CuPy that of the CUDA runtime that torch has loaded; None if that is not found by its
    name.

    A ``copy_`` of torch queues the same copy. It needs a tensor for each side, and the stream must be made the current
    one and restored: about ten Python calls.
    """
    if cupy is not None:
        return cast(MemcpyAsync, cupy.cuda.runtime.memcpyAsync)
    queue = _runtimes_memcpy()
    if queue is not None:
        queue.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        queue.restype = _raised
    return cast(MemcpyAsync | None, queue)


def memcpy_address() -> int:
    """Address of the CUDA runtime's ``cudaMemcpyAsync``, for compiled code; 0 if that is not found by its name."""
    queue = _runtimes_memcpy()
    return 0 if queue is None else ctypes.cast(queue, ctypes.c_void_p).value or 0


def _runtimes_memcpy() -> Any:
    if torch.version.cuda is not None:
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}").cudaMemcpyAsync
    return None


def _raised(status: int) -> None:
    if status != 0:
        raise RuntimeError(
            f"CUDA error {status}: a copy between device and host could not be queued; an earlier error may be the "
            "cause, which CUDA_LAUNCH_BLOCKING=1 shows"
        )


class PinnedMemory:
    """``size_bytes`` of pinned memory at ``pointer``; ``tensor`` is a view of them. :meth:`free` releases them.

    ``processors`` should touch it first (:func:`processors_near`); if empty, any processors may. Where the driver
    refuses to pin it, it is ordinary memory, if ``refused`` is given, which is told the reason.

    Raises ``OSError`` if it is refused otherwise, or if that much memory is not available, before it is touched: one
    page too many would end the process.
    """

    def __init__(
        self,
        size_bytes: int,
        cupy: Any,
        processors: frozenset[int] = frozenset(),
        refused: Callable[[str], None] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self._registered = False
        self._owner: Any = None
        left_bytes = available_bytes()
        if size_bytes > left_bytes:
            raise _not_to_be_had(size_bytes, f"{left_bytes} are left")
        if cupy is not None:
            try:
                with _running_on(processors):
                    self._owner = cupy.cuda.PinnedMemory(size_bytes)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if refused is None:
                    raise _not_to_be_had(size_bytes, str(error)) from None
                refused(str(error))
        if self._owner is not None:
            self.pointer = int(self._owner.ptr)
            buffer: Any = (ctypes.c_ubyte * size_bytes).from_address(self.pointer)
            buffer.owner = self._owner  # views of the tensor may outlive this object
            self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            return
        self.tensor = _mapped(size_bytes)
        self.pointer = self.tensor.data_ptr()
        _touch(self.pointer, size_bytes, processors)
        if cupy is not None:  # it was refused
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self.pointer, size_bytes, 0))
        self._registered = status == 0
        if status != 0:
            _forget_error()
            if refused is None:
                raise _not_to_be_had(size_bytes, f"CUDA error {status}")
            refused(f"CUDA error {status}")

    def free(self) -> None:
        """Releases it; no copy may be running. Idempotent."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.pointer)
            self._registered = False
        self._owner = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


class PinnedByTorch:
    """``size_bytes`` from torch's own allocator of pinned memory, which may round them up: ``tensor``.

    Where there is none or it refuses, it is ordinary memory, and ``refused`` is told the reason. Raises ``OSError`` if
    that much memory is not available.
    """

    def __init__(self, size_bytes: int, refused: Callable[[str], None]) -> None:
        self.size_bytes = size_bytes
        left_bytes = available_bytes()
        if size_bytes > left_bytes:
            raise _not_to_be_had(size_bytes, f"{left_bytes} are left")
        with without_modes():
            try:
                self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                refused(str(error).partition("\n")[0])
                self.tensor = _mapped(size_bytes)
                _touch(self.tensor.data_ptr(), size_bytes, frozenset())

    def free(self) -> None:
        """Releases it; no copy may be running. Idempotent."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


def small_buffer(size_bytes: int) -> torch.Tensor:
    """Bytes on the host from torch's own pinned memory; ordinary ones where that is refused."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # torch has taken CUDA's error away by raising it
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def processors_near(where: torch.device) -> frozenset[int]:
    """Of those that this process may use, the processors of the NUMA node that the GPU is on; empty if unknown."""
    facts: Any = torch.cuda.get_device_properties(where)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int((PCI_DEVICES / address / "numa_node").read_text())
        if node >= 0:
            return frozenset(_listed((NODES / f"node{node}" / "cpulist").read_text())) & os.sched_getaffinity(0)
    return frozenset()


def _listed(ranges: str) -> Iterator[int]:
    """The numbers of a list such as ``0-3,8``."""
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _mapped(size_bytes: int) -> torch.Tensor:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel may be built without huge pages
            mapping.madvise(advice)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _touch(address: int, size_bytes: int, processors: frozenset[int]) -> None:
    """Writes every page once, on several threads: ``memset`` is called without the interpreter's lock."""
    usable = len(processors or os.sched_getaffinity(0))
    threads = max(1, min(_MOST_THREADS, usable, size_bytes // _LEAST_BYTES_A_THREAD))
    part = -(-size_bytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE

    def touch(first: int) -> None:
        with _running_on(processors):
            ctypes.memset(address + first, 0, min(part, size_bytes - first))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, size_bytes, part)))


@contextlib.contextmanager
def _running_on(processors: frozenset[int]) -> Iterator[None]:
    """Within the block the calling thread runs only on these processors, if the system allows it."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors or before)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _forget_error() -> None:
    """CUDA keeps the last failure, and torch would report it for the next kernel. Here that failure does not matter."""
    with contextlib.suppress(RuntimeError), without_modes():
        torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))  # a kernel; zeros may be a memset


def _not_to_be_had(size_bytes: int, reason: str) -> OSError:
    return OSError(errno.ENOMEM, f"{size_bytes} bytes of host memory could not be pinned: {reason}")
