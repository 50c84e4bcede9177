"""Where a search had better begin: bytes that grow nearly in proportion say it after two or three looks."""

from __future__ import annotations

from collections.abc import Callable

LOOKS = 3
"""Most values that are looked at beside the first."""

Size = Callable[[int], int | None]
"""Bytes that a value takes; None where there is no such value."""


def aimed(size_bytes: Size, limit_bytes: int, start: int, low: int, high: int) -> int:
    """A value from ``low`` to ``high`` about as large as ``limit_bytes`` hold, by secants through sizes from ``start``.

    For sizes that are a constant and a share of the value it is the largest that fits. It is a guess for any other.
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
