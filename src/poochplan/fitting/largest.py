"""The largest whole number of at most some size, found in few questions: a search that knows no workload.

Each number that is asked for is where the line through the sizes of the last two meets the limit. Every fourth halves
the interval instead, for sizes that are no line or are only known to fit or not. Finally the neighbours are tried one
by one, because sizes need not be monotonic. A number may also have no size (an image size that is no multiple of 16);
then the nearest one that has a size is asked for instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NEIGHBOURS = 3
"""This many values above the one found are tried, each separately."""
SCAN = 64
"""If a value does not exist, one that does is looked for within this distance on either side."""

Size = Callable[[int], float | None]
"""The size of a value, infinite or minus infinite if only its side of the limit is known; None if the value does not
exist."""


@dataclass(frozen=True)
class Found:
    value: int | None
    """The largest value that fits; None if none of the tried ones does."""
    following: int | None
    """The smallest value above it that was tried and does not fit; None if the range ends before."""
    misfits: tuple[int, ...]
    """Smaller values that do not fit. If there are any, sizes are not monotonic."""


def largest(size: Size, limit: float, start: int, low: int, high: int, neighbours: int = NEIGHBOURS) -> Found:
    """The largest value from ``low`` to ``high`` whose size is at most ``limit``, found from ``start``.

    If sizes are monotonic, it is the largest there is. Otherwise it fits, and the next ``neighbours`` existing values
    do not. Values that do not exist must lie less than :data:`SCAN` from one that does; otherwise they count as the end
    of the range. No value is asked for twice.
    """
    asked = _Asked(size, limit)
    below, above, guess, turn = low - 1, high + 1, min(max(start, low), high), 0
    while above - below > 1:
        guess = min(max(guess, below + 1), above - 1)
        value = next((one for one in _around(guess, below, above) if asked(one) is not None), None)
        if value is not None and asked(value):
            below = value
        else:
            above = guess if value is None else value
        turn += 1
        aim = None if turn % 4 == 0 else asked.aim()
        if aim is None:
            aim = above // 2 if below < low else 2 * below if above > high else (below + above) // 2
        guess = aim
    if below >= low:
        below = _past_neighbours(asked, below, high, neighbours)
    misfits = sorted(one for one in asked.sizes if asked(one) is False)
    following = next((one for one in misfits if one > below), None)
    return Found(below if below >= low else None, following, tuple(one for one in misfits if low <= one < below))


class _Asked:
    """The questions of one search; state: the sizes by value, in the order of asking."""

    def __init__(self, size: Size, limit: float) -> None:
        self._size, self._limit = size, limit
        self.sizes: dict[int, float | None] = {}

    def __call__(self, value: int) -> bool | None:
        if value not in self.sizes:
            self.sizes[value] = self._size(value)
        size = self.sizes[value]
        return None if size is None else size <= self._limit

    def aim(self) -> int | None:
        """Where sizes reach the limit, by the last two; of one alone, at most twice or half the value. None if these
        tell nothing.
        """
        known = [(value, size) for value, size in self.sizes.items() if size is not None and math.isfinite(size)]
        if not known:
            return None
        last, size = known[-1]
        if len(known) == 1:
            return int(min(2.0 * last, max(last / 2, last * self._limit / size))) if size > 0 else 2 * last
        growth = (size - known[-2][1]) / (last - known[-2][0])
        return math.floor(last + (self._limit - size) / growth) if growth > 0 else None


def _around(middle: int, below: int, above: int) -> Iterator[int]:
    """Values strictly between, from the middle on both sides, as far as a search looks."""
    for distance in range(SCAN):
        for value in (middle - distance, middle + distance) if distance else (middle,):
            if below < value < above:
                yield value


def _past_neighbours(asked: _Asked, below: int, high: int, neighbours: int) -> int:
    """The value, or a larger one that fits, whose next neighbours do not."""
    misses, refused, value = 0, 0, below
    while misses < neighbours and refused < SCAN and value < high:
        value += 1
        fits = asked(value)
        if fits:
            below, misses, refused = value, 0, 0
        elif fits is None:
            refused += 1
        else:
            misses, refused = misses + 1, 0
    return below
