"""Host memory: which of it is pinned, the driver's calls that pin it, and CuPy's."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from dataclasses import dataclass, field

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
"""``cudaError_t``."""
MOST_PINNED_BYTES = 8 << 30
POISON = 0xFF
_POISONED_BYTES = 8 << 20


@dataclass
class HostMemory:
    """Pinned ranges, by address; the copies queued on them; and what went wrong."""

    violations: list[str]
    pinned: dict[int, int] = field(default_factory=dict)
    most_bytes: int = MOST_PINNED_BYTES
    has_refused: bool = False
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Copies that have not run: where on the host, and how many bytes."""

    def is_pinned(self, address: int) -> bool:
        return any(first <= address < first + size_bytes for first, size_bytes in tuple(self.pinned.items()))

    def pin(self, address: int, size_bytes: int) -> int:
        if size_bytes == 0:
            return INVALID_VALUE
        if self.is_pinned(address):
            return ALREADY_REGISTERED
        if sum(tuple(self.pinned.values())) + size_bytes > self.most_bytes:
            self.has_refused = True
            return OUT_OF_MEMORY
        self.pinned[address] = size_bytes
        ctypes.memset(address, POISON, min(size_bytes, _POISONED_BYTES))
        return 0

    def unpin(self, address: int) -> int:
        if address not in self.pinned:
            self.violations.append("memory was given back that is not pinned")
            return NOT_REGISTERED
        size_bytes = self.pinned.pop(address)
        for key, (first, _) in list(self.pending.items()):
            if address <= first < address + size_bytes:
                del self.pending[key]  # it would read or write what is anybody's by then
                self.violations.append(f"{size_bytes} pinned bytes were given back while a copy of them was queued")
        return 0


class CudaRuntime:
    """``torch.cuda.cudart()``."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return self._memory.pin(address, size_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        return self._memory.unpin(address)


class CUDARuntimeError(RuntimeError):
    """CuPy's."""


def cupy_module(memory: HostMemory, copy: Callable[[int, int, int, int, int], None]) -> types.ModuleType:
    """A module that stands for CuPy: pinned memory of an exact size, and copies by address."""

    class PinnedMemory:
        def __init__(self, size_bytes: int) -> None:
            if size_bytes > memory.most_bytes:
                memory.has_refused = True
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            self._bytes = (ctypes.c_ubyte * size_bytes)()
            address = ctypes.addressof(self._bytes)
            if memory.pin(address, size_bytes) != 0:
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            self.ptr = address

        def __del__(self) -> None:
            if hasattr(self, "ptr"):
                memory.unpin(self.ptr)

    def attributes(address: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(type=1 if memory.is_pinned(address) else 0)

    module = types.ModuleType("cupy")
    module.__version__ = "stand-in"  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        PinnedMemory=PinnedMemory,
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            runtimeGetVersion=lambda: 13000,
            pointerGetAttributes=attributes,
            memcpyAsync=copy,
        ),
    )
    return module
