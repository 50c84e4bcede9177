"""Kernels for the bits of masks on CUDA: each narrows or widens in one pass (``native/bits.cu``).

CuPy compiles them, and queues them on torch's current stream. They take no memory, and nothing waits for them. Where
there is no CuPy that fits, the ops of torch in ``bits.py`` give the same bits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from poochplan.formats.narrow import TABLE_ROWS
from poochplan.runtime.devices.pinned import cupy_or_none, fitting_cupy, tried
from poochplan.torch_private.cuda_internals import raw_stream

SOURCE = Path(__file__).parent / "native" / "bits.cu"
NAMES = tuple(f"{name}_{size_bytes}" for name in ("narrow", "widen") for size_bytes in (1, 2, 4))
ALIGNED_BYTES = 16
"""At a multiple of this begin the buffers of a kernel."""
THREADS = 256
"""Of a block."""
_TRIED = 77
"""Bools: the last of them are read and written one by one."""


class _Stream(NamedTuple):
    """What CuPy reads of a stream that is not its own."""

    ptr: int


class Kernels:
    """The kernels on the current GPU."""

    def __init__(self, cupy: Any) -> None:
        module = cupy.RawModule(code=SOURCE.read_text())
        self._functions = {name: module.get_function(name) for name in NAMES}

    def narrow(self, whole: torch.Tensor, bits: torch.Tensor, table: torch.Tensor) -> bool:
        """Queues narrowing. False, without effect, if a buffer begins at another place than a kernel needs."""
        return self._queue(f"narrow_{whole.itemsize}", whole, len(whole), bits, table, 16)

    def widen(self, bits: torch.Tensor, whole: torch.Tensor, table: torch.Tensor) -> bool:
        """The same for widening."""
        return self._queue(f"widen_{whole.itemsize}", bits, len(whole), whole, table, 16 // whole.itemsize)

    def _queue(
        self, name: str, source: torch.Tensor, count: int, into: torch.Tensor, table: torch.Tensor, each: int
    ) -> bool:
        """``each``: the elements of a thread."""
        if source.data_ptr() % ALIGNED_BYTES or into.data_ptr() % ALIGNED_BYTES:
            return False
        where, blocks = source.device, -(-count // (each * THREADS))
        assert where.index is not None
        with torch.cuda.device(where):  # CuPy takes the kernel of the current GPU
            given = source.data_ptr(), count, into.data_ptr(), table.data_ptr()
            self._functions[name]((blocks,), (THREADS,), given, stream=_Stream(raw_stream(where.index)))
        return True


def kernels_on(where: torch.device) -> Kernels | None:
    """Those of a GPU; None without a CuPy that fits and compiles them. They are tried once for each GPU."""
    cupy = cupy_or_none()
    return _fitting(cupy, where) if cupy is not None and fitting_cupy(cupy, where) is not None else None


@functools.lru_cache(maxsize=4)
def _fitting(cupy: Any, where: torch.device) -> Kernels | None:
    def trial() -> tuple[Kernels, str]:
        kernels = Kernels(cupy)
        return kernels, "" if _is_right(kernels, where) else "they gave other bits"

    return tried(
        trial,
        where,
        f"CuPy {cupy.__version__} has no kernels for the bits of masks here",
        "ops of torch make them, in more time; install the CuPy for this CUDA (poochplan[cuda12] or [cuda13]) with its "
        "compiler, NVRTC",
    )


def _is_right(kernels: Kernels, where: torch.device) -> bool:
    """Whether some bools have numpy's bits, and come back. It takes less than plans count for the smallest mask."""
    packed = np.packbits(np.arange(_TRIED) % 3 == 0, bitorder="little").tolist()
    whole = (torch.arange(_TRIED, dtype=torch.uint8, device=where) % 3 == 0).view(torch.uint8)
    table = torch.zeros(8 * TABLE_ROWS, dtype=torch.uint8, device=where)
    table[-1] = 1
    bits, back = torch.zeros(len(packed), dtype=torch.uint8, device=where), torch.full_like(whole, 2)
    was_queued = kernels.narrow(whole, bits, table) and kernels.widen(bits, back, table)
    return was_queued and bits.tolist() == packed and back.tolist() == whole.tolist()
