"""Private names of torch's CUDA devices and other accelerators, and the purpose of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def clear_cublas_workspaces() -> None:
    """Frees the memory that cuBLAS holds between ops outside of tensors, so that its bytes can be counted."""
    torch._C._cuda_clearCublasWorkspaces()


def set_allocator(settings: str) -> None:
    """Sets the caching allocator as ``PYTORCH_ALLOC_CONF`` would, from now on; what is left out has its default."""
    torch._C._accelerator_setAllocatorSettings(settings)


def allocator_settings() -> dict[str, Any]:
    """The caching allocator's settings: ``expandable_segments``, ``max_split_size`` (-1 for none) and others; and all
    that a user has set, in the environment or since, as one text: ``PYTORCH_CUDA_ALLOC_CONF``. Empty if this torch does
    not tell them.
    """
    found: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return dict(found)


def can_trace_memory() -> bool:
    """Whether the caching allocator can write a trace of its requests, and nobody has it write one already."""
    has_trace = hasattr(torch._C, "_cuda_isHistoryEnabled") and torch.cuda.get_allocator_backend() == "native"
    return has_trace and not torch._C._cuda_isHistoryEnabled()


def trace_memory(*, is_on: bool) -> None:
    """Has the caching allocator trace its requests, without stacks, or ends that. Beginning clears the last trace."""
    torch.cuda.memory._record_memory_history("all" if is_on else None, context=None, clear_history=is_on)


def memory_trace(index: int) -> list[tuple[str, int, int]]:
    """The trace of a GPU: action, address, and bytes as requested."""
    entries = torch.cuda.memory._snapshot(index)["device_traces"][index]
    return [(entry["action"], entry["addr"], entry["size"]) for entry in entries]


def request_block(size_bytes: int, index: int) -> None:
    """Takes a block of the caching allocator and gives it back, which marks a place in the trace."""
    with torch.cuda.device(index):
        address = torch._C._cuda_cudaCachingAllocator_raw_alloc(size_bytes, raw_stream(index))
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)


MemoryStats = Callable[[int], dict[str, Any]]
ResetPeaks = Callable[[int], object]


def memory_stats_calls(kind: str) -> tuple[MemoryStats, ResetPeaks, MemoryStats]:
    """The functions through which the public calls of ``torch.cuda`` read the allocator's statistics of a GPU and reset
    its peaks, and through which ``torch.accelerator`` reads the same statistics. Of other types of device those of
    ``torch.accelerator`` alone.
    """
    of_accelerator = torch._C._accelerator_getDeviceStats
    if kind != "cuda":
        return of_accelerator, torch._C._accelerator_resetPeakStats, of_accelerator
    return torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats, of_accelerator


def stand_before_memory_stats(kind: str, stats: MemoryStats, reset: ResetPeaks, of_accelerator: MemoryStats) -> None:
    """Replaces the functions that the public calls go through."""
    if kind == "cuda":
        torch._C._cuda_memoryStats = stats  # type: ignore[assignment]
        torch._C._cuda_resetPeakMemoryStats = reset  # type: ignore[assignment]
    torch._C._accelerator_resetPeakStats = reset  # type: ignore[assignment]
    torch._C._accelerator_getDeviceStats = of_accelerator  # type: ignore[assignment]


def cudnn_versions() -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """cuDNN's version here, and the one that torch was built with; None without cuDNN. ``torch.backends.cudnn.version``
    refuses a wrong one only when it is first called.
    """
    if not torch.backends.cudnn.is_available():
        return None
    return torch._C._cudnn.getRuntimeVersion(), torch._C._cudnn.getCompileVersion()


def raw_stream(index: int) -> int:
    """The address of the current stream of a GPU, a cheap check whether it has changed."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def gpu_sleep(cycles: int, where: torch.device) -> None:
    """Keeps the device's current stream busy, so that later work is timed without the host's gaps."""
    with torch.cuda.device(where):
        torch.cuda._sleep(cycles)
