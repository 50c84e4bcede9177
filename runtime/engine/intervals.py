"""Intervals of bytes behind one another: taken at the lowest free place that fits, and given back."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right

from poochplan.formats.plan import host_aligned

_NO_END = sys.maxsize


class Intervals:
    """State: the holes between what is taken, as (first byte, byte behind), lowest first; the last one has no end.

    Taking looks at the holes, never at what is taken; giving back finds its neighbours by bisection. Each changes the
    list in one assignment: an interrupt (Ctrl-C) may cost an interval, and never hands one out twice.
    """

    def __init__(self, start_bytes: int = 0) -> None:
        self._holes = [(host_aligned(start_bytes), _NO_END)]

    def take(self, size_bytes: int) -> int:
        """The first byte of an interval of that size, which is rounded up to the alignment of host memory."""
        size_bytes = _rounded(size_bytes)
        index, (start, end) = next(
            (index, hole) for index, hole in enumerate(self._holes) if hole[1] - hole[0] >= size_bytes
        )
        behind = start + size_bytes
        self._holes[index : index + 1] = [(behind, end)] if behind < end else []
        return start

    def take_at(self, start: int, size_bytes: int) -> None:
        """The interval of that size at ``start``, which is free."""
        end = start + _rounded(size_bytes)
        index = bisect_right(self._holes, (start, _NO_END)) - 1
        first, behind = self._holes[index]
        assert first <= start, "another interval ends behind its start"
        assert end <= behind, "another interval begins before its end"
        self._holes[index : index + 1] = [hole for hole in ((first, start), (end, behind)) if hole[0] < hole[1]]

    def give_back(self, start: int, size_bytes: int) -> None:
        """The interval that was taken at ``start`` with this size is free again; holes that touch become one."""
        end = start + _rounded(size_bytes)
        first = behind = bisect_left(self._holes, (start,))
        if first > 0 and self._holes[first - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if self._holes[behind][0] == end:
            end = self._holes[behind][1]
            behind += 1
        self._holes[first:behind] = [(start, end)]


def _rounded(size_bytes: int) -> int:
    return host_aligned(max(1, size_bytes))  # nothing takes a place too: no two share a first byte
