"""The process allocator: make dropped tensors leave resident memory."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD_BYTES = 64 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def give_freed_memory_back() -> bool:
    """Fixes glibc's mmap threshold at 64 KiB, so that each larger tensor is its own mapping and goes when it is freed.

    What it costs is fresh pages for every tensor, up to half a step's time where tensors are large. Huge pages take
    most of that back: ``THP_MEM_ALLOC_ENABLE=1``, which torch reads at its first allocation (so it must be in the
    environment before; ``pooch`` sets it), or ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``.

    Threads started from now on share the arenas there are: glibc would give each its own, 64 MiB of address space that
    count under ``ulimit -v`` (256 MiB for the four that copy in a profile of mode ``swap-all``) and small blocks that
    stay in each.

    Left alone, glibc raises the threshold to the largest block it ever freed and keeps such blocks in its heap (187 MiB
    of dropped 1-6 MiB tensors in one measurement). Holds for the whole process, from now on; profiles are taken under
    it too, so that fresh pages cost the same in the profile and in the run.

    Returns False where the C library has no ``mallopt`` (nothing is changed then).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        _M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES,
        _M_TRIM_THRESHOLD: MMAP_THRESHOLD_BYTES,
        _M_ARENA_MAX: 1,
    }
    return all(mallopt(name, value) for name, value in settings.items())
