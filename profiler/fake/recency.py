"""What the processor's cache still holds of a step's values when an op reads them.

A memory-bound op takes several times as long when what it reads has to come from memory. Run by itself, again and
again, it would find everything in the cache; in the step it finds what was touched lately.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_BYTES = 16 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20}


def cache_bytes() -> int:
    """Size of this processor's largest cache; 16 MiB where the system does not tell."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS and size[:-1].isdigit()]
    return max(known, default=_UNKNOWN_BYTES)


class Recency:
    """A cache of ``capacity_bytes`` that evicts whole values, least recently touched first. State: what it holds."""

    def __init__(self, capacity_bytes: int) -> None:
        self._left_bytes = capacity_bytes
        self._held: OrderedDict[int, int] = OrderedDict()

    def holds(self, value: int) -> bool:
        """Whether the value is there."""
        return value in self._held

    def touch(self, value: int, size_bytes: int) -> None:
        """Reads or writes the value: it is there now, and others may no longer be."""
        self._left_bytes += self._held.pop(value, 0)
        self._held[value] = size_bytes
        self._left_bytes -= size_bytes
        while self._left_bytes < 0:
            _, evicted_bytes = self._held.popitem(last=False)
            self._left_bytes += evicted_bytes
