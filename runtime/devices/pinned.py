"""Pinned host memory: the host tier of the CUDA device, at its exact size.

torch's own allocator of pinned memory rounds up to powers of two; CuPy takes what it is asked for. Without CuPy,
a mapping of ordinary memory is registered with the driver (``cudaHostRegister``), which pins it where it lies.

A page lies on the NUMA node whose processor touches it first, and it is there that the GPU should be: otherwise every
copy crosses the link between the processors. So CuPy's memory is allocated, and a mapping is touched, by threads that
run on the node of the GPU, where the system tells it. A mapping is touched by several: one alone writes new pages at
a few GB/s. Huge pages make that some hundred times fewer faults.

No child of a fork gets the mapping (``MADV_DONTFORK``): it would be copied there, and a page that is copied at the
first write is no longer the one that the GPU writes to.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from poochplan.runtime.watch.users_line import users_line
from poochplan.tensors.host_memory import available_bytes
from poochplan.torch_private.tensor_internals import without_modes

PCI_DEVICES, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
_MOST_THREADS = 8
_LEAST_BYTES_A_THREAD = 16 << 20
_TRIED_BYTES = 4096


def cupy_or_none() -> Any:
    """CuPy, if it is installed and finds a CUDA runtime."""
    with contextlib.suppress(Exception):  # an installation that does not fit fails in many ways
        import cupy

        cupy.cuda.runtime.runtimeGetVersion()
        return cupy
    return None


@functools.lru_cache(maxsize=4)
def fitting_cupy(cupy: Any, where: torch.device) -> Any:
    """It, if it pins memory and copies there as it should; else None, and one line says why. Tried once for each GPU.

    What was built for another CUDA than the driver's imports well, and fails at its first call.
    """
    reason = _misfit(cupy, where) if cupy is not None else ""
    if not reason:
        return cupy
    warnings.warn(
        f"poochplan: CuPy {cupy.__version__} does not work with this driver and torch {torch.__version__} ({reason}): "
        "going on without it; install the one for this CUDA (poochplan[cuda12] or [cuda13]), or none",
        RuntimeWarning,
        stacklevel=users_line(),
    )
    return None


def _misfit(cupy: Any, where: torch.device) -> str:
    """What is wrong with it; empty where nothing is."""
    try:
        with torch.cuda.device(where), without_modes():
            pinned = cupy.cuda.PinnedMemory(_TRIED_BYTES)
            stream = torch.cuda.current_stream(where)
            there = torch.full((_TRIED_BYTES,), 7, dtype=torch.uint8, device=where)
            cupy.cuda.runtime.memcpyAsync(int(pinned.ptr), there.data_ptr(), _TRIED_BYTES, 2, stream.cuda_stream)
            stream.synchronize()
            found = bytes((ctypes.c_ubyte * _TRIED_BYTES).from_address(int(pinned.ptr)))
    except Exception as error:  # it fails in many ways
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
    return "" if found == bytes([7]) * _TRIED_BYTES else "a copy gave other bytes"


MemcpyAsync = Callable[[int, int, int, int, int], object]
"""``cudaMemcpyAsync(to, source, size_bytes, kind, stream)``, which raises where CUDA refuses."""


def memcpy_async(cupy: Any) -> MemcpyAsync | None:
    """CuPy's; without it that of the CUDA runtime that torch has loaded; None where that is not found by its name.

    A ``copy_`` of torch queues the same copy. It wants a tensor for each side, and the stream made the current one and
    back: some ten Python calls.
    """
    if cupy is not None:
        return cast(MemcpyAsync, cupy.cuda.runtime.memcpyAsync)
    if torch.version.cuda is None:
        return None
    with contextlib.suppress(OSError, AttributeError):
        queue = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}").cudaMemcpyAsync
        queue.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        queue.restype = _raised
        return cast(MemcpyAsync, queue)
    return None


def _raised(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error {status}: a copy between device and host could not be queued")


class PinnedMemory:
    """``size_bytes`` of pinned memory at ``pointer``; ``tensor`` is a view of them. Given back by :meth:`free`.

    ``processors`` are those that should touch it first (:func:`processors_near`); none for any.

    Raises ``OSError`` where so much is not to be had, before it is touched: a page too many would end the process.
    """

    def __init__(self, size_bytes: int, cupy: Any, processors: frozenset[int] = frozenset()) -> None:
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
                raise _not_to_be_had(size_bytes, str(error)) from None
            self.pointer = int(self._owner.ptr)
            self.tensor = torch.frombuffer((ctypes.c_ubyte * size_bytes).from_address(self.pointer), dtype=torch.uint8)
            return
        self.tensor = _mapped(size_bytes)
        self.pointer = self.tensor.data_ptr()
        _touch(self.pointer, size_bytes, processors)
        status = int(torch.cuda.cudart().cudaHostRegister(self.pointer, size_bytes, 0))
        if status != 0:
            _forget_error()
            raise _not_to_be_had(size_bytes, f"CUDA error {status}")
        self._registered = True

    def free(self) -> None:
        """Gives it back; no copy may be under way. Idempotent."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.pointer)
            self._registered = False
        self._owner = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


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
    """The calling thread runs on these alone within the block, where the system lets it."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors or before)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _forget_error() -> None:
    """CUDA keeps the last failure, and torch would report it of the next kernel; here that is one of no use."""
    with contextlib.suppress(RuntimeError), without_modes():
        torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))


def _not_to_be_had(size_bytes: int, reason: str) -> OSError:
    return OSError(errno.ENOMEM, f"{size_bytes} bytes of host memory could not be pinned: {reason}")
