"""Rectangle packing: an offset in one arena for each block, so that no two blocks that live at the same time overlap.

A block is a rectangle: its lifetime wide, its bytes high. No arena is smaller than the peak of live bytes. Tried are
the heuristic of profile-guided allocation (Sekiyama et al., 2018, arXiv:1804.10001: the lowest line takes the
longest-lived block that fits it, or is lifted to its neighbour) and first fit in several orders, in which blocks that
stick out above the peak of live bytes then move to the front; the smallest arena found is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.planner.problem.arrays import Ints

TRIES = 20
"""First fits tried at most."""
PLACEMENTS = 16_000
"""Blocks placed at most in all of these; but two are tried always."""


class Block(NamedTuple):
    """Bytes that are taken from time ``start`` up to, and without, time ``end``."""

    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True)
class Packing:
    """Where each block is."""

    offsets: tuple[int, ...]
    """Per block, in the order given: its first byte, a multiple of the allocation unit."""
    arena_bytes: int
    lower_bound_bytes: int
    """Most bytes that are live at any time, each block rounded up to the allocation unit."""


def pack(blocks: Sequence[Block]) -> Packing:
    """Places ``blocks`` in an arena that is as small as a few quick orders make it; the same blocks, the same places.

    Sizes are rounded up to ``ALLOCATION_UNIT_BYTES``. 10,000 blocks take a few seconds.

    Raises
    ------
    ValueError
        A block ends before it has begun, or has a negative size.
    """
    rectangles = _Rectangles(blocks)
    best, bound = rectangles.best_fit(), rectangles.peak()
    orders = rectangles.orders(best)
    for turn in range(min(TRIES, max(2, PLACEMENTS // max(1, len(blocks))))):
        if rectangles.top(best) == bound:
            break
        order = orders[turn % len(orders)]
        found = rectangles.first_fit(order)
        top = rectangles.top(found)
        if top < rectangles.top(best):
            best = found
        sticks_out = (found + rectangles.size)[order] > (bound + top) // 2
        orders[turn % len(orders)] = np.concatenate([order[sticks_out], order[~sticks_out]])
    return Packing(tuple(map(int, best)), rectangles.top(best), bound)


def live_peak(blocks: Sequence[Block]) -> int:
    """Most bytes of ``blocks`` that are live at any time, each rounded up to the allocation unit."""
    return _Rectangles(blocks).peak()


class _Rectangles:
    """The blocks as arrays, sizes rounded up."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        table = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        self.start, self.end = table[:, 0], table[:, 1]
        self.size = -(-table[:, 2] // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES
        wrong = np.flatnonzero((self.end <= self.start) | (table[:, 2] < 0))
        if len(wrong):
            raise ValueError(f"expected blocks with start < end and size_bytes >= 0, found {blocks[int(wrong[0])]}")

    def peak(self) -> int:
        """Most bytes live at any time."""
        _, _, live = self._live()
        return int(live.max(initial=0))

    def _live(self) -> tuple[Ints, Ints, Ints]:
        """Bytes live at each time at which a block starts or ends; and per block, which of these times: the one at
        which it starts, and the one at which it is over.
        """
        times = np.unique(np.concatenate([self.start, self.end]))
        first, after = np.searchsorted(times, self.start), np.searchsorted(times, self.end)
        return first, after, occupancy(len(times), (first, after - 1, self.size))

    def top(self, offsets: Ints) -> int:
        """Bytes of the arena of these places."""
        return int((offsets + self.size).max(initial=0))

    def orders(self, placed: Ints) -> list[Ints]:
        """The blocks by size; by size times lifetime; by the most that lives beside them; as they are ``placed``."""
        life = self.end - self.start
        return [
            np.lexsort((-life, -self.size)),
            np.lexsort((-life, -self.size * life)),
            np.lexsort((-self.size, -life, -self._most_beside())),
            np.lexsort((self.start, placed)),
        ]

    def _most_beside(self) -> Ints:
        """Per block: most bytes live at any time of its life."""
        first, after, live = self._live()
        spans = zip(first.tolist(), after.tolist(), strict=True)
        return np.array([live[begin:end].max() for begin, end in spans], dtype=np.int64)

    def first_fit(self, order: Ints) -> Ints:
        """Each block in turn at the lowest place that is free for its whole life."""
        offsets = np.zeros(len(order), dtype=np.int64)
        placed = np.zeros((4, len(order)), dtype=np.int64)  # in the order of their places
        blocks = np.stack([order, self.start[order], self.end[order], self.size[order]], axis=1).tolist()
        for count, (block, start, end, size) in enumerate(blocks):
            starts, ends, low, high = placed[:, :count]
            beside = np.flatnonzero((starts < end) & (ends > start))
            offset = _lowest_gap(low[beside], high[beside], size) if len(beside) else 0
            at = int(low.searchsorted(offset))
            placed[:, at + 1 : count + 1] = placed[:, at:count]
            placed[:, at] = start, end, offset, offset + size
            offsets[block] = offset
        return offsets

    def best_fit(self) -> Ints:
        """The skyline heuristic: the lowest line takes the longest-lived block that fits it, or is lifted."""
        offsets = np.zeros(len(self.size), dtype=np.int64)
        if not len(offsets):
            return offsets
        waiting = np.lexsort((-self.size, self.start - self.end))
        line = _Line(0, int(self.start.min()), int(self.end.max()))
        lines = [line]
        start, end, taken = self.start[waiting], self.end[waiting], np.zeros(len(waiting), dtype=bool)
        left = len(waiting)
        while left:
            line = heappop(lines)
            if line.is_gone:
                continue
            fits = (start >= line.start) & (end <= line.end) & ~taken
            first = int(fits.argmax())
            if not fits[first]:
                heappush(lines, line.lifted())
                continue
            block = int(waiting[first])
            offsets[block] = line.height
            taken[first] = True
            left -= 1
            for piece in line.split(int(start[first]), int(end[first]), line.height + int(self.size[block])):
                heappush(lines, piece)
            if 2 * left < len(waiting):
                waiting, start, end = waiting[~taken], start[~taken], end[~taken]
                taken = np.zeros(left, dtype=bool)
        return offsets


def _lowest_gap(low: Ints, high: Ints, size: int) -> int:
    """The lowest offset with ``size`` bytes free beside rectangles from ``low`` to ``high``, the lowest first."""
    if low[0] >= size:
        return 0
    tops = np.maximum.accumulate(high)
    is_room = low[1:] - tops[:-1] >= size
    first = int(is_room.argmax()) if len(is_room) else 0
    return int(tops[first] if len(is_room) and is_room[first] else tops[-1])


class _Line:
    """A stretch of time in which nothing is placed at ``height`` or above."""

    __slots__ = ("after", "before", "end", "height", "is_gone", "start")

    def __init__(self, height: int, start: int, end: int) -> None:
        self.height, self.start, self.end = height, start, end
        self.before: _Line | None = None
        self.after: _Line | None = None
        self.is_gone = False

    def __lt__(self, other: _Line) -> bool:
        return (self.height, self.start) < (other.height, other.start)

    def lifted(self) -> _Line:
        """This line raised to its lower neighbour, and one with what is as high there."""
        beside = [line for line in (self.before, self.after) if line is not None]
        return self._replaced([(min(line.height for line in beside), self.start, self.end)])[0]

    def split(self, start: int, end: int, height: int) -> list[_Line]:
        """The lines in place of this one after ``start`` to ``end`` of it was raised to ``height``."""
        pieces = [(self.height, self.start, start), (height, start, end), (self.height, end, self.end)]
        return self._replaced([piece for piece in pieces if piece[1] < piece[2]])

    def _replaced(self, pieces: list[tuple[int, int, int]]) -> list[_Line]:
        before, after = self.before, self.after
        self.is_gone = True
        if before is not None and before.height == pieces[0][0]:
            pieces[0] = (before.height, before.start, pieces[0][2])
            before.is_gone, before = True, before.before
        if after is not None and after.height == pieces[-1][0]:
            pieces[-1] = (after.height, pieces[-1][1], after.end)
            after.is_gone, after = True, after.after
        lines = [_Line(*piece) for piece in pieces]
        for left, right in pairwise([before, *lines, after]):
            if left is not None:
                left.after = right
            if right is not None:
                right.before = left
        return lines
