"""The marks of an allocator's peaks, kept before a reset.

An allocator has one mark of each kind, and whoever resets it does so for all. So the marks are kept here before a
reset, and every public call of torch that reads them returns the higher of the two: peaks of single steps change no
peak that the user reads. A reset by the user ends that.
"""

from __future__ import annotations

import threading
from typing import Any

from poochplan.torch_private.cuda_internals import (
    MemoryStats,
    ResetPeaks,
    memory_stats_calls,
    stand_before_memory_stats,
)

Marks = dict[tuple[str, str], int]
"""By statistic and pool, such as ("allocated_bytes", "all")."""


class HighWater:
    """State: for each GPU, the height of each mark before it was reset here: of all time, and since the step began.

    Parameters
    ----------
    stats, reset: torch's own calls, by the number of a GPU.
    of_accelerator: that of ``torch.accelerator``, which reads the same marks.
    """

    def __init__(self, stats: MemoryStats, reset: ResetPeaks, of_accelerator: MemoryStats) -> None:
        self._stats, self._reset, self._of_accelerator = stats, reset, of_accelerator
        self._kept: dict[int, Marks] = {}
        self._of_step: dict[int, Marks] = {}
        self._lock = threading.RLock()

    def stats(self, index: int) -> dict[str, Any]:
        """The statistics that the user reads, as if nothing had been reset here."""
        with self._lock:
            return _raised(self._stats(index), self._kept.get(index, {}))

    def accelerator_stats(self, index: int) -> dict[str, Any]:
        """The same for ``torch.accelerator``."""
        with self._lock:
            return _raised(self._of_accelerator(index), self._kept.get(index, {}))

    def reset(self, index: int) -> None:
        """The user resets the marks; those of the step stay."""
        with self._lock:
            self.begin_part(index)
            self._kept.pop(index, None)

    def begin(self, index: int) -> None:
        """A step begins: its peaks are separated from all before."""
        with self._lock:
            self.begin_part(index)
            self._of_step.pop(index, None)

    def begin_part(self, index: int) -> None:
        """A part of a step begins, such as an op that is measured; the step's marks and the user's stay."""
        with self._lock:
            now = {
                (name, pool): int(mark["peak"])
                for name, pools in self._stats(index).items()
                if isinstance(pools, dict)
                for pool, mark in pools.items()
                if isinstance(mark, dict) and "peak" in mark
            }
            for kept in (self._kept, self._of_step):
                before = kept.get(index, {})
                kept[index] = {of: max(peak_bytes, before.get(of, 0)) for of, peak_bytes in now.items()}
            self._reset(index)

    def since_begin(self, index: int, name: str) -> int:
        """The most of that statistic since the last :meth:`begin`."""
        with self._lock:
            return max(int(self._stats(index)[name]["all"]["peak"]), self._of_step.get(index, {}).get((name, "all"), 0))

    def of_part(self, index: int, name: str) -> tuple[int, int]:
        """That statistic now, and its most since the last :meth:`begin_part`."""
        found = self._stats(index)[name]["all"]
        return int(found["current"]), int(found["peak"])

    def count(self, index: int, name: str) -> int:
        """How often an event has happened; 0 if this allocator does not count it."""
        return int(self._stats(index).get(name, 0))


def _raised(stats: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """The same statistics, with no mark lower than given."""
    for (name, pool), peak_bytes in marks.items():
        mark = stats.get(name, {}).get(pool)
        if mark is not None:
            mark["peak"] = max(mark["peak"], peak_bytes)
    return stats


_LOCK = threading.Lock()
_installed: HighWater | None = None


def high_water(kind: str) -> HighWater:
    """The object of this process, for that type of device: a process has one accelerator. It stays in front of torch's
    calls, for the user may read the marks long after.
    """
    global _installed
    with _LOCK:
        stats, reset, of_accelerator = memory_stats_calls(kind)
        if _installed is None or stats not in (_installed.stats, _installed.accelerator_stats):
            _installed = HighWater(stats, reset, of_accelerator)
            stand_before_memory_stats(kind, _installed.stats, _installed.reset, _installed.accelerator_stats)
        return _installed
