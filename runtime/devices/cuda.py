"""The CUDA device: the accelerator's, with CUDA's own pinned memory, copies and names of queued work.

Also what is of CUDA alone: graphs, whose addresses never change, and the limit of its allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import cast

import torch

from poochplan.errors import UsageError
from poochplan.guard import users
from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.compiler_internals import captures_graphs

from .accelerator import TO_HOST, AcceleratorDevice, QueueStream
from .backend import backend_of
from .pinned import Part, PinnedMemory, cupy_or_none, fitting_cupy, memcpy_address, memcpy_async, processors_near


class CudaDevice(AcceleratorDevice):
    """See :class:`~.accelerator.AcceleratorDevice`. ``spans``: each copy and replay is named in an NVTX range, for
    Nsight Systems; this takes some microseconds each.
    """

    def _pinner(self) -> Callable[[int], PinnedMemory]:
        cupy = fitting_cupy(cupy_or_none(), self.where)
        self._memcpy = memcpy_async(cupy)
        near = processors_near(self.where)

        def pin(size_bytes: int) -> PinnedMemory:
            with torch.cuda.device(self.where):  # otherwise an unused GPU would get a context
                return PinnedMemory(size_bytes, cupy, near, self._not_pinned)

        return pin

    @cached_property
    def memcpy_address(self) -> int:  # type: ignore[override]
        return memcpy_address()

    def _counted_bytes(self) -> str:
        """Raises ``UsageError`` for an allocator that keeps no statistics."""
        backend = torch.cuda.get_allocator_backend()
        if backend == "native":
            return "requested_bytes"
        if backend == "cudaMallocAsync":  # CUDA counts the bytes that its own pool hands out, which are those requested
            return "allocated_bytes"
        raise UsageError(
            "allocator: expected torch's own (native or cudaMallocAsync), which tells what a step takes, found "
            f"{backend}; run without torch.cuda.memory.change_current_allocator"
        )

    def _queue(self, storage: torch.UntypedStorage, parts: list[Part], kind: int, stream: QueueStream) -> None:
        if self._memcpy is None:
            super()._queue(storage, parts, kind, stream)
            return
        at, handle = storage.data_ptr(), cast("torch.cuda.Stream", stream.stream).cuda_stream
        for memory, offset, size_bytes in parts:
            host = memory.pointer + offset
            to, source = (host, at) if kind == TO_HOST else (at, host)
            self._memcpy(to, source, size_bytes, kind, handle)
            at += size_bytes

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """An NVTX range; the engine asks for it if ``spans`` is true."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


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
    where = backend_of(where).where
    total_bytes = torch.cuda.get_device_properties(where).total_memory
    before = torch.cuda.get_per_process_memory_fraction(where)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), where)
    try:
        yield
    finally:  # without a limit, cudaMallocAsync reports a share far above 1, which it does not take
        torch.cuda.set_per_process_memory_fraction(min(1.0, before), where)
