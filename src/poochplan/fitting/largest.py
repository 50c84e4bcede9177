"""The largest whole number with a property, found in few questions: a search that knows no workload.

The number grows until the answer is no, and the interval is then halved. Finally the neighbours are tried one by one,
because the property need not be monotonic. The answer may also be that a value does not exist (an image size that is no
multiple of 16); then the nearest value that exists is tried instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

NEIGHBOURS = 3
"""This many values above the one found are tried, each separately."""
SCAN = 64
"""If a value does not exist, one that does is looked for within this distance on either side."""

LOOKS = 3
"""Most values that are tried besides the first."""

Answer = Callable[[int], bool | None]
"""Whether a value fits; None if the value does not exist."""
Size = Callable[[int], int | None]
"""Bytes of a value; None if the value does not exist."""


class Gait(StrEnum):
    """How a search moves away from its first value: by factors, or, from a good guess, by steps of one value, two,
    four.
    """

    DOUBLE = "double"
    STEP = "step"

    def at(self, start: int, count: int, upward: bool) -> int:
        """The value after ``count`` strides from ``start``, at least 0."""
        if self is Gait.DOUBLE:
            return start << count if upward else start >> count
        far = (1 << count) - 1
        return start + far if upward else max(0, start - far)


@dataclass(frozen=True)
class Found:
    value: int | None
    """The largest value that fits; None if none of the tried ones does."""
    following: int | None
    """The smallest value above it that was tried and does not fit; None if the range ends before."""
    misfits: tuple[int, ...]
    """Smaller values that do not fit. If there are any, the property is not monotonic."""
    answers: Mapping[int, bool | None]
    """All answers."""


def largest(
    fits: Answer, start: int, low: int, high: int, gait: Gait = Gait.DOUBLE, neighbours: int = NEIGHBOURS
) -> Found:
    """The largest value from ``low`` to ``high`` that fits, found from ``start``.

    If the property is monotonic, it is the largest there is. Otherwise it fits, and the next ``neighbours`` existing
    values do not. Values that do not exist must lie less than :data:`SCAN` from one that does; otherwise they count as
    the end of the range. No value is tried twice.
    """
    asked = _Asked(fits, low, high)
    start = min(max(start, low), high)
    existing = asked.existing(_around(start, low - 1, high + 1))
    start = start if existing is None else existing
    below, above = _bracket(asked, start, gait)
    if above is not None:
        below = _halved(asked, below, above)
    if below >= low:
        below = _past_neighbours(asked, below, neighbours)
    return asked.found(below if below >= low else None)


class _Asked:
    """The questions of one search and their answers; state: ``answers``."""

    def __init__(self, fits: Answer, low: int, high: int) -> None:
        self._fits = fits
        self.low, self.high = low, high
        self.answers: dict[int, bool | None] = {}

    def __call__(self, value: int) -> bool | None:
        if value not in self.answers:
            self.answers[value] = self._fits(value)
        return self.answers[value]

    def existing(self, values: Iterator[int]) -> int | None:
        """The first of the values that exists; None if none of them does."""
        return next((value for value in values if self(value) is not None), None)

    def found(self, value: int | None) -> Found:
        larger = [x for x, fits in self.answers.items() if fits is False and (value is None or x > value)]
        smaller = [x for x, fits in self.answers.items() if fits is False and value is not None and x < value]
        return Found(value, min(larger, default=None), tuple(sorted(smaller)), self.answers)


def _bracket(asked: _Asked, start: int, gait: Gait) -> tuple[int, int | None]:
    """A value that fits, or the one before the range, and a larger one that does not fit or exist; None if there is no
    larger one.
    """
    if asked(start):
        below, count = start, 1
        while below < asked.high:
            beyond = max(below + 1, min(asked.high, gait.at(start, count, upward=True)))
            if not asked(beyond):
                return below, beyond
            below, count = beyond, count + 1
        return below, None
    above, nearer, count = start, start, 1
    while nearer > asked.low:
        nearer = min(nearer - 1, max(asked.low, gait.at(start, count, upward=False)))
        if asked(nearer):
            return nearer, above
        above = nearer if asked(nearer) is False else above
        count += 1
    return asked.low - 1, above


def _halved(asked: _Asked, below: int, above: int) -> int:
    """The largest value between the two that fits, for a monotonic property; ``below`` if none does."""
    while above - below > 1:
        middle = (below + above) // 2
        value = asked.existing(_around(middle, below, above))
        if value is None:
            above = middle
        elif asked(value):
            below = value
        else:
            above = value
    return below


def _around(middle: int, below: int, above: int) -> Iterator[int]:
    """Values strictly between, from the middle on both sides, as far as a search looks."""
    for distance in range(SCAN):
        for value in (middle - distance, middle + distance) if distance else (middle,):
            if below < value < above:
                yield value


def _past_neighbours(asked: _Asked, below: int, neighbours: int) -> int:
    """The value, or a larger one that fits, whose next neighbours do not."""
    misses, refused, value = 0, 0, below
    while misses < neighbours and refused < SCAN and value < asked.high:
        value += 1
        fits = asked(value)
        if fits:
            below, misses, refused = value, 0, 0
        elif fits is None:
            refused += 1
        else:
            misses, refused = misses + 1, 0
    return below


def aimed(size_bytes: Size, limit_bytes: int, start: int, low: int, high: int) -> int:
    """A value from ``low`` to ``high`` of about ``limit_bytes``, by secants through sizes from ``start``.

    If sizes are a constant plus a multiple of the value, it is the largest that fits. Otherwise it is a guess.
    """
    size = size_bytes(start)
    if size is None:
        return start
    known = [(start, size)]
    value = _within(2 * start if size <= limit_bytes else start // 2, low, high)
    for _ in range(LOOKS):
        size = size_bytes(value)
        if size is None or value in (other for other, _ in known):
            break
        known.append((value, size))
        (first, first_bytes), (last, last_bytes) = known[-2:]
        growth = (last_bytes - first_bytes) / (last - first)
        if growth <= 0:
            break
        value = _within(int(last + (limit_bytes - last_bytes) // growth), low, high)
    return value


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))
