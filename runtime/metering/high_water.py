"""High water: a CUDA allocator's peaks of single steps, without spoiling the peaks that the user reads.

The allocator has one mark of each kind, and whoever begins it anew takes it from all others. So what the marks were
is kept, and every public call of torch that reads them is given the higher of the two. A reset of the user's ends that.
"""

from __future__ import annotations

import threading
from typing import Any

from poochplan.torch_private.tensor_internals import (
    MemoryStats,
    ResetPeaks,
    accelerator_stats_call,
    memory_stats_calls,
    stand_before_memory_stats,
)

Mark = tuple[str, str]
"""A statistic and its pool, such as ("allocated_bytes", "all")."""


class HighWater:
    """State: of each GPU, how high each mark was before it was begun anew here.

    Parameters
    ----------
    stats, reset: torch's own calls, by the number of a GPU.
    of_accelerator: that of ``torch.accelerator``, which reads the same marks.
    """

    def __init__(self, stats: MemoryStats, reset: ResetPeaks, of_accelerator: MemoryStats | None = None) -> None:
        self._stats = stats
        self._reset = reset
        self._of_accelerator = of_accelerator
        self._kept: dict[int, dict[Mark, int]] = {}
        self._lock = threading.RLock()

    def stats(self, index: int) -> dict[str, Any]:
        """What the user is to read: as if nothing had been begun anew here."""
        with self._lock:
            return self._raised(index, self._stats(index))

    def accelerator_stats(self, index: int) -> dict[str, Any]:
        """The same where ``torch.accelerator`` asks."""
        assert self._of_accelerator is not None
        with self._lock:
            return self._raised(index, self._of_accelerator(index))

    def _raised(self, index: int, found: dict[str, Any]) -> dict[str, Any]:
        for (name, pool), peak_bytes in self._kept.get(index, {}).items():
            mark = found.get(name, {}).get(pool)
            if mark is not None:
                mark["peak"] = max(mark["peak"], peak_bytes)
        return found

    def reset(self, index: int) -> None:
        """The user begins the marks anew."""
        with self._lock:
            self._kept.pop(index, None)
            self._reset(index)

    def begin(self, index: int) -> None:
        """A step begins: its peaks are to be told apart from all before."""
        with self._lock:
            self._kept[index] = {
                (name, pool): mark["peak"]
                for name, pools in self.stats(index).items()
                if isinstance(pools, dict)
                for pool, mark in pools.items()
                if isinstance(mark, dict) and "peak" in mark
            }
            self._reset(index)

    def since_begin(self, index: int, name: str) -> int:
        """The most of that statistic since the last :meth:`begin`."""
        return int(self._stats(index)[name]["all"]["peak"])

    def count(self, index: int, name: str) -> int:
        """How often something has happened; 0 where this allocator does not count it."""
        return int(self._stats(index).get(name, 0))


_LOCK = threading.Lock()
_installed: HighWater | None = None


def high_water() -> HighWater:
    """The one of this process. It stays before torch's calls once it was asked for: the user may read long after."""
    global _installed
    with _LOCK:
        if _installed is None or memory_stats_calls()[0] != _installed.stats:
            own = accelerator_stats_call()
            _installed = HighWater(*memory_stats_calls(), own)
            of_accelerator = None if own is None else _installed.accelerator_stats
            stand_before_memory_stats(_installed.stats, _installed.reset, of_accelerator)
        return _installed
