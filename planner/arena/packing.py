"""Rectangle packing: an offset in one arena for each block, so that no two blocks that live at the same time overlap.

A block is a rectangle: its width is its lifetime, its height its bytes. No arena is smaller than the peak of live
bytes. First fit in several orders gives a first arena, and searches then make it smaller (:func:`improved`). Work is
counted, not timed: the same blocks get the same places.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Ints, occupancy
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.planner.simulator.evaluator import address, library


def first_fit(spans: Ints, order: Ints) -> Ints:
    """The offset of each block; int64, (blocks,).

    ``spans`` has a column for each block and the rows start, end, size; int64, (3, blocks). ``order`` names each block
    once. Bytes may have any unit, because offsets are sums of sizes.
    """
    offsets = np.zeros(len(order), dtype=np.int64)
    native = library(None)
    if native is not None:
        native.first_fit(address(spans), address(order), len(order), address(offsets))
        return offsets
    lives = spans.T.tolist()
    placed: list[tuple[int, int, int, int]] = []  # first byte, byte after the last, start, end; lowest first
    for block in order.tolist():
        start, end, size = lives[block]
        offset = 0
        for low, high, other_start, other_end in placed:
            if other_start < end and other_end > start:
                if low - offset >= size:
                    break
                offset = max(offset, high)
        insort_left(placed, (offset, offset + size, start, end), key=lambda one: one[0])
        offsets[block] = offset
    return offsets


COARSEST = 24
"""Number of blocks in the first step of a search."""
TURNS = 50_000
"""Approximate limit of the blocks that one search places."""
FEWEST_SEARCHES = 2
"""The allowance is divided among at least this many searches."""
LOWERED = (0.7, 0.85)
"""Share of the arena's excess over the bound that the next search may keep; tried in turn while searches fail."""
CLOSE = 0.001
"""If the excess is less than this share of the bound, the next search aims at the bound itself."""
DEAREST = 1_000_000
WAITS = -1
"""Offset of a block without a place."""


@dataclass(frozen=True)
class Manner:
    cost: float
    """The cost of a block is its area (bytes times lifetime) to this power."""
    life: float
    """The first blocks are those of the greatest size times lifetime to this power."""
    growth: float
    """Factor by which each step places more blocks than the one before."""


WARM = Manner(0.4, 0.0, np.inf)
"""All at once, from the best places so far."""
MANNERS = (
    *(Manner(cost, life, 1.4) for life, cost in product((0.25, 0.5, 0.0), (0.4, 0.55))),
    WARM,
    *(Manner(cost, life, 2.0) for life, cost in product((0.25, 0.5, 0.0), (0.4, 0.3))),
    WARM,
)


def improved(spans: Ints, bound: int, offsets: Ints, looks: int, enough: int) -> Ints:
    """Better places of blocks than ``offsets``, by searches until ``looks`` are used up (:func:`place_all`), or the
    ``bound``, which is proven, or ``enough`` is reached. ``spans`` has rows start, end, size, (3, blocks).
    """
    share = min(max(looks // FEWEST_SEARCHES, 1), TURNS * len(offsets))
    number = failed = 0
    while looks > 0 and (top := _top(spans, offsets)) > max(bound, enough):
        above = int((top - bound) * LOWERED[failed % len(LOWERED)])
        height = max(bound + (above if above > CLOSE * bound else 0), enough)
        found, taken = _search(spans, offsets, height, MANNERS[number % len(MANNERS)], min(share, looks), number)
        looks -= max(taken, 1)
        number += 1
        failed += 1
        if found is not None:
            offsets, failed = settled(spans, found), 0
    return offsets


def _top(spans: Ints, offsets: Ints) -> int:
    """Height of an arena."""
    return int((offsets + spans[2]).max(initial=0))


def _search(spans: Ints, best: Ints, height: int, manner: Manner, allowance: int, seed: int) -> tuple[Ints | None, int]:
    """(Places below ``height``, or None; looks taken)."""
    life = (spans[1] - spans[0]).astype(np.float64)
    areas = (spans[2] * life) ** manner.cost
    costs = 1 + (areas * (DEAREST / areas.max())).astype(np.int64)
    hard = np.lexsort((-life, -(spans[2] * life**manner.life)))
    offsets = best.copy() if manner is WARM else np.full(len(best), WAITS, dtype=np.int64)
    taken, count = 0, len(hard) if manner is WARM else min(COARSEST, len(hard))
    while True:
        some = hard[:count]
        places = offsets[some]
        placed = np.ascontiguousarray(spans[:, some])
        left, looks = place_all(placed, places, height, costs[some], allowance - taken, seed)
        offsets[some] = places
        taken += looks
        if left:
            return None, taken
        if count == len(hard):
            return offsets, taken
        count = min(len(hard), int(count * manner.growth) + 1)


def settled(spans: Ints, offsets: Ints) -> Ints:
    """The same places with every block moved down as far as the blocks below it permit."""
    return first_fit(spans, np.lexsort((spans[0], offsets)))


def place_all(spans: Ints, offsets: Ints, height: int, costs: Ints, allowance: int, seed: int) -> tuple[int, int]:
    """Gives every block a place below ``height``, or stops; returns (blocks without one, looks taken).

    A block without room gets the cheapest place and ejects the blocks there; see ``native/packing.h``. Only compiled
    code does this, because plain Python would be too slow to gain anything.

    Parameters
    ----------
    spans
        Rows start, end, size; a column for each block; int64, (3, blocks). No size is 0 or above ``height``.
    offsets
        Places of blocks, without an overlap. A block below 0 or above ``height`` has no place. Written in place.
    costs
        Cost of ejecting each block; int64, (blocks,), from 1 to a million.
    allowance
        Most looks, exceeded by one turn at most. A look examines one block.
    """
    looks = np.array([allowance], dtype=np.int64)
    given = address(spans), len(offsets), address(offsets), height, address(costs), seed
    return int(library().place_all(*given, address(looks))), int(looks[0])


QUICK_PER_BLOCK = 10_000
"""Number of looks per block for a few hundredths of a second at 1,000 blocks."""
THOROUGH = 1_200_000_000
"""Number of looks for a few seconds."""
LOOKS_PER_BLOCK = 100_000
"""Most looks per block for packing along with a plan: a second or two for some thousands of blocks."""
MOST_LOOKS = 400_000_000
"""Most looks of a second search for places while a training waits: a second or two, at most three times. In six plans
of three networks they were enough for the planned arena, and a quarter of them for 0.5% more."""
PER_PAIR = 3_000
"""Most looks for each pair of blocks, because few blocks need no long search."""


class Block(NamedTuple):
    """Bytes that are taken from time ``start`` to before time ``end``."""

    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True)
class Packing:
    """The places of all blocks."""

    offsets: tuple[int, ...]
    """Per block, in the order given: its first byte, a multiple of the allocation unit."""
    arena_bytes: int
    lower_bound_bytes: int
    """Most bytes that are live at any time, each block rounded up to the allocation unit."""


def pack(blocks: Sequence[Block], looks: int | None = None, enough_bytes: int = 0) -> Packing:
    """Places ``blocks`` in an arena, made smaller by a search. The same blocks and looks give the same places.

    Sizes are rounded up to ``ALLOCATION_UNIT_BYTES``. The search takes about ``looks`` looks, the unit of work of
    ``place_all``: ``THOROUGH``, or any number. By default it is quick, with ``QUICK_PER_BLOCK`` for each block. Three
    first fits come before it, without a limit; without a compiler they are all. It ends once the arena has at most
    ``enough_bytes``.

    Raises ``ValueError`` if a block ends before it begins, or has a negative size.
    """
    start, end, units = _arrays(blocks)
    taken = np.flatnonzero(units)
    spans, bound = _spans(start[taken], end[taken], units[taken])
    offsets = np.zeros(len(units), dtype=np.int64)
    if len(taken):
        size, life = spans[2], spans[1] - spans[0]
        orders = np.lexsort((-life, -size)), np.lexsort((-life, -size * life)), np.lexsort((-size, -life))
        best = min((first_fit(spans, order) for order in orders), key=lambda places: _top(spans, places))
        if library(None) is not None:
            wanted = min(QUICK_PER_BLOCK * len(taken) if looks is None else looks, PER_PAIR * len(taken) ** 2)
            best = improved(spans, bound, best, wanted, enough_bytes // ALLOCATION_UNIT_BYTES)
        offsets[taken] = best
    top = int((offsets + units).max(initial=0))
    return Packing(
        tuple((offsets * ALLOCATION_UNIT_BYTES).tolist()), top * ALLOCATION_UNIT_BYTES, bound * ALLOCATION_UNIT_BYTES
    )


def packed(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
    """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes, while a training waits.
    The search takes as long as along with a plan. If the arena is then larger than ``room_bytes``, another search for
    those takes ``MOST_LOOKS``.
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

    Blocks that overlap in time overlap at one of these times, so the others do not matter.
    """
    times = np.unique(start)
    first, after = np.searchsorted(times, start), np.searchsorted(times, end)
    return np.stack([first, after, units]), int(occupancy(len(times), (first, after - 1, units)).max(initial=0))
