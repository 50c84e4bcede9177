"""The CUDA device on a machine without CUDA: the same Python calls, on streams and events that only keep order.

The calling thread is what is measured. So the stand-ins for what ``torch.cuda`` does in Python make the same frames
and objects as torch 2.13 does, and those for what it does in C do next to nothing. Copies are made at once, by the
calling thread: by a C function called through ``ctypes``, as the CUDA runtime is; by ``memmove`` where CuPy is to be
there; or as ``copy_`` of torch.

The stand-ins take the place of the name ``torch`` in the modules of the CUDA device. So whatever those call of
``torch.cuda`` that is not stood in for here fails on a machine without CUDA, and is not measured wrongly.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch.cuda._utils import _get_device_index

from poochplan.runtime.devices import accelerator, backend, cuda, pinned

ON_GPU = torch.device("cuda", 0)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = current_stream() if stream is None else stream

    def wait(self, stream: Stream | None = None) -> None:
        if stream is None:
            current_stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        pass


class Stream:
    """``torch.cuda.Stream``: told apart by its number, 0 for the one that computes."""

    made = 0

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls)

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **kwargs: Any) -> None:
        if stream_id is None:
            Stream.made += 1
        self.cuda_stream = self.stream_id = Stream.made if stream_id is None else stream_id
        self.device = ON_GPU
        self.device_index, self.device_type = 0, 1

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))


class StreamContext:
    """``torch.cuda.stream(...)``: asks for the stream before, and sets twice."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.idx = _get_device_index(ON_GPU, True)

    def __enter__(self) -> None:
        self.before = current_stream()
        if self.before.device != self.stream.device:
            raise AssertionError("one GPU")
        set_stream(self.stream)

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        set_stream(self.before)


def current_stream(device: Any = None) -> Stream:
    _get_device_index(ON_GPU, optional=True)  # whatever is asked for: the storages lie on the CPU
    return Stream(stream_id=0, device_index=0, device_type=1)


def set_stream(stream: Stream) -> None:
    _nothing(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _nothing(*_: Any, **__: Any) -> int:
    return 0


TORCH_CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "current_stream": current_stream,
    "set_stream": set_stream,
    "stream": StreamContext,
    "current_device": _nothing,
    "get_device_properties": lambda device=None: SimpleNamespace(),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "max_memory_allocated": _nothing,
    "max_memory_reserved": _nothing,
    "is_current_stream_capturing": lambda: False,
    "get_allocator_backend": lambda: "native",
    "device": contextlib.nullcontext,
    "cudart": lambda: SimpleNamespace(cudaHostRegister=_nothing, cudaHostUnregister=_nothing),
    "nvtx": SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None),
}
"""What the modules of the CUDA device find in ``torch.cuda`` in place of torch's own."""


class _Instead:
    """A module, some names of which are others."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        setattr(self, name, found)  # asked once, as a module is
        return found


class _Pinned:
    def __init__(self, size_bytes: int) -> None:
        self._bytes = (ctypes.c_ubyte * size_bytes)()
        self.ptr = ctypes.addressof(self._bytes)


def _copy(to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
    ctypes.memmove(to, source, size_bytes)


def _runtimes_copy() -> Any:
    """``cudaMemcpyAsync`` called through ``ctypes``: a C function, which takes no notice of kind and stream."""
    queue = ctypes.CDLL(None).memmove
    queue.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    queue.restype = lambda status: None
    return queue


CUPY = SimpleNamespace(
    cuda=SimpleNamespace(
        runtime=SimpleNamespace(memcpyAsync=_copy, CUDARuntimeError=RuntimeError), PinnedMemory=_Pinned
    )
)


COPIES = ("runtime", "cupy", "torch")
"""Who makes the copies: the CUDA runtime, called through ``ctypes``; CuPy; torch, where neither is found."""


class StandIn(cuda.CudaDevice):
    """A GPU whose storages lie in host memory, so that ops of the CPU run on them."""

    def __init__(self) -> None:
        super().__init__(ON_GPU)
        self.kind, self.where = "cpu", torch.device("cpu")


@contextlib.contextmanager
def stand_in(copies: str = "runtime") -> Iterator[Callable[[], StandIn]]:
    """Within the block ``apply(..., device=...)`` takes what is given. ``copies``: one of ``COPIES``."""
    with_cupy = copies == "cupy"
    instead = _Instead(torch, {"cuda": _Instead(torch.cuda, TORCH_CUDA)})
    with contextlib.ExitStack() as stack:
        for module in (accelerator, backend, cuda, pinned):
            stack.enter_context(patch.object(module, "torch", instead))
        stack.enter_context(patch.object(cuda, "cupy_or_none", lambda: CUPY if with_cupy else None))
        stack.enter_context(patch.object(cuda, "fitting_cupy", lambda cupy, where: cupy))
        if copies != "cupy":
            queue = _runtimes_copy() if copies == "runtime" else None
            stack.enter_context(patch.object(cuda, "memcpy_async", lambda cupy: queue))
        no_peaks = SimpleNamespace(begin=_nothing, since_begin=_nothing, count=lambda index, name: 0)
        stack.enter_context(patch.object(accelerator, "high_water", lambda kind: no_peaks))
        stack.enter_context(patch.object(backend, "raw_stream", lambda index: 0))
        yield StandIn
