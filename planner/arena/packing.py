"""Rectangle packing: an offset in one arena for each block, so that no two blocks that live at the same time overlap.

A block is a rectangle: its lifetime wide, its bytes high. No arena is smaller than the peak of live bytes. First fit in
several orders gives a first arena (``first_fit.py``), and searches then make it smaller (``portfolio.py``). Work is
counted, not timed: the same blocks get the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.planner.evaluator.evaluator_library import library
from poochplan.planner.problem.arrays import Ints

from .first_fit import first_fit
from .portfolio import Portfolio

QUICK_PER_BLOCK = 10_000
"""Looks for each block that take a few hundredths of a second at 1,000 blocks."""
THOROUGH = 1_200_000_000
"""Looks that take a few seconds."""
LOOKS_PER_BLOCK = 100_000
"""What packing along with a plan may take: a second or two for some thousands of blocks."""
MOST_LOOKS = 400_000_000
"""Looks that a second search for places may take while a training waits: a second or two, three times at most. In six
plans of three networks they were enough for the arena that was planned, and a quarter of them for 0.5% more."""
PER_PAIR = 3_000
"""Looks for each pair of blocks at most: a few blocks need no long search."""


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


def pack(blocks: Sequence[Block], looks: int | None = None, enough_bytes: int = 0) -> Packing:
    """Places ``blocks`` in an arena as small as a search makes it; the same blocks and looks, the same places.

    Sizes are rounded up to ``ALLOCATION_UNIT_BYTES``. The search takes about ``looks`` looks at a block, the unit of
    work of ``place_all``: ``THOROUGH``, or any number. By default it is quick, ``QUICK_PER_BLOCK`` for each block.
    Three first fits come before, which no number limits; without a compiler they are all. It ends as soon as the arena
    is of ``enough_bytes`` or less.

    Raises
    ------
    ValueError
        A block ends before it has begun, or has a negative size.
    """
    start, end, units = _arrays(blocks)
    taken = np.flatnonzero(units)
    spans, bound = _spans(start[taken], end[taken], units[taken])
    offsets = np.zeros(len(units), dtype=np.int64)
    if len(taken):
        fits = [first_fit(spans, order) for order in _orders(spans)]
        portfolio = Portfolio(spans, bound, min(fits, key=lambda places: int((places + spans[2]).max())))
        enough = enough_bytes // ALLOCATION_UNIT_BYTES
        wanted = QUICK_PER_BLOCK * len(taken) if looks is None else looks
        if library(None) is not None:
            portfolio.improve(min(wanted, PER_PAIR * len(taken) ** 2), enough)
        offsets[taken] = portfolio.best
    top = int((offsets + units).max(initial=0))
    return Packing(
        tuple((offsets * ALLOCATION_UNIT_BYTES).tolist()), top * ALLOCATION_UNIT_BYTES, bound * ALLOCATION_UNIT_BYTES
    )


def packed(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
    """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes, for a training that waits.
    It is searched for as long as a plan's is; where that is larger than ``room_bytes``, for an arena of those, with
    ``MOST_LOOKS``.
    """
    every = [Block(*block) for block in blocks]
    found = pack(every, LOOKS_PER_BLOCK * len(every))
    if found.arena_bytes > room_bytes >= found.lower_bound_bytes:
        found = pack(every, MOST_LOOKS, enough_bytes=room_bytes)
    return found.offsets, found.arena_bytes


def live_peak(blocks: Sequence[Block]) -> int:
    """Most bytes of ``blocks`` that are live at any time, each rounded up to the allocation unit."""
    return _spans(*_arrays(blocks))[1] * ALLOCATION_UNIT_BYTES


def _arrays(blocks: Sequence[Block]) -> tuple[Ints, Ints, Ints]:
    """Start, end and allocation units of each block."""
    table = np.array(blocks, dtype=np.int64).reshape(-1, 3)
    wrong = np.flatnonzero((table[:, 1] <= table[:, 0]) | (table[:, 2] < 0))
    if len(wrong):
        raise ValueError(f"expected blocks with start < end and size_bytes >= 0, found {blocks[int(wrong[0])]}")
    return table[:, 0], table[:, 1], -(-table[:, 2] // ALLOCATION_UNIT_BYTES)


def _spans(start: Ints, end: Ints, units: Ints) -> tuple[Ints, int]:
    """Rows start, end, units, in times at which a block starts; and the most units live at one of them.

    What overlaps in time does so at one of these times, so the others do not matter.
    """
    times = np.unique(start)
    first, after = np.searchsorted(times, start), np.searchsorted(times, end)
    return np.stack([first, after, units]), int(occupancy(len(times), (first, after - 1, units)).max(initial=0))


def _orders(spans: Ints) -> list[Ints]:
    """The blocks by size; by size times lifetime; by lifetime."""
    size, life = spans[2], spans[1] - spans[0]
    return [np.lexsort((-life, -size)), np.lexsort((-life, -size * life)), np.lexsort((-size, -life))]
