"""Pinned host memory: the host tier of the CUDA device, at its exact size.

torch's own allocator of pinned memory rounds up to powers of two; CuPy takes what it is asked for. Without CuPy,
ordinary memory is registered with the driver (``cudaHostRegister``), which pins it where it lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from typing import Any

import torch

from poochplan.tensors.torch_private import without_modes


def cupy_or_none() -> Any:
    """CuPy, if it is installed and finds a CUDA runtime."""
    with contextlib.suppress(Exception):  # an installation that does not fit fails in many ways
        import cupy

        cupy.cuda.runtime.runtimeGetVersion()
        return cupy
    return None


class PinnedMemory:
    """``size_bytes`` of pinned memory at ``pointer``; ``tensor`` is a view of them. Given back by :meth:`free`.

    Raises ``OSError`` where so much is not to be had.
    """

    def __init__(self, size_bytes: int, cupy: Any) -> None:
        self.size_bytes = size_bytes
        self._registered = False
        self._owner: Any = None
        if cupy is not None:
            try:
                self._owner = cupy.cuda.PinnedMemory(size_bytes)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise _not_to_be_had(size_bytes, str(error)) from None
            self.pointer = int(self._owner.ptr)
            self.tensor = torch.frombuffer((ctypes.c_ubyte * size_bytes).from_address(self.pointer), dtype=torch.uint8)
            return
        try:
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise _not_to_be_had(size_bytes, "not enough memory") from error
        self.pointer = self.tensor.data_ptr()
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


def _forget_error() -> None:
    """CUDA keeps the last failure, and torch would report it of the next kernel; here that is one of no use."""
    with contextlib.suppress(RuntimeError), without_modes():
        torch.zeros(1, device="cuda")


def _not_to_be_had(size_bytes: int, reason: str) -> OSError:
    return OSError(errno.ENOMEM, f"{size_bytes} bytes of host memory could not be pinned: {reason}")
