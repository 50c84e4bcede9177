"""Placing blocks below a given height: a block that finds no room takes the cheapest place, and who lay there waits.

The ejection search of Nagata and Braeysy (2009, "A powerful route minimization heuristic for the vehicle routing
problem with time windows"), for rectangles: each time that a block finds no room, it becomes dearer to eject. All is
counted in integers, and its random numbers are its own, so the same call does the same, compiled or not.
"""

from __future__ import annotations

import numpy as np

from poochplan.planner.evaluator.compiled import compiled, part
from poochplan.planner.problem.arrays import Ints

from .first_fit import BLOCK, END, HIGH, LOW, ROWS, START, put

WAITS = -1
"""Offset of a block without a place."""
FORGETS_AFTER = 20_000
"""Turns after which what a block has become dearer by is halved."""
PER_EJECTION = 8
"""Looks that each block beside counts for where one is ejected: sorting and weighing."""

WHO, FROM, TO, COST_BELOW, BY_END, COST_ENDED = range(6)
"""Rows of the blocks beside another, those lowest first: number, first byte, byte after the last; what all before
cost; then the columns in the order of ``TO``, and what all before in that order cost."""
COST, PLACE, TIES, STATE = range(4)
"""The cheapest place so far, how many were as cheap, and the state of the random numbers."""


@compiled
def place_all(spans: Ints, offsets: Ints, height: int, costs: Ints, allowance: int, seed: int) -> tuple[int, int]:
    """Gives every block a place below ``height``, or stops; returns (blocks without one, looks taken).

    Parameters
    ----------
    spans
        Rows start, end, size; a column for each block; int64, (3, blocks). No size is 0 or above ``height``.
    offsets
        Where blocks are, without an overlap; below 0 is nowhere, as is what sticks out of ``height``. Written in place.
    costs
        What it costs to take a block's place away; int64, (blocks,), from 1 to a million.
    allowance
        Looks taken at most, and one turn's more. A look is one block that is looked at.
    """
    count = len(offsets)
    placed = np.empty((ROWS, count + 1), dtype=np.int64)
    beside = np.empty((6, count + 1), dtype=np.int64)
    waiting = np.empty(count + 1, dtype=np.int64)
    factors = np.ones(count, dtype=np.int64)
    cheapest = np.array([0, 0, 0, seed], dtype=np.int64)
    there, left = _take_over(spans, offsets, height, placed, waiting)
    looks = turn = 0
    while left and looks < allowance:
        turn += 1
        block = _dearest(waiting, left, costs, factors)
        left -= 1
        near = _look_beside(spans, block, placed, there, beside)
        looks += there + left
        place = _lowest_gap(beside, near, spans[2, block], height)
        if place == WAITS:
            looks += PER_EJECTION * near
            factors[block] += 1
            _weigh(beside, near, costs, factors)
            place = _cheapest_place(beside, near, spans[2, block], height, cheapest)
            there, left = _eject(spans, block, place, placed, there, waiting, left)
        put(placed, there, spans, block, place)
        there += 1
        if turn % FORGETS_AFTER == 0:
            for k in range(count):
                factors[k] = (factors[k] + 1) // 2
    for k in range(left):
        offsets[waiting[k]] = WAITS
    for k in range(there):
        offsets[placed[BLOCK, k]] = placed[LOW, k]
    return left, looks


@part
def _take_over(spans: Ints, offsets: Ints, height: int, placed: Ints, waiting: Ints) -> tuple[int, int]:
    """(How many are placed, how many wait) at the beginning."""
    there = left = 0
    for block in range(len(offsets)):
        if offsets[block] < 0 or offsets[block] + spans[2, block] > height:
            waiting[left] = block
            left += 1
        else:
            put(placed, there, spans, block, offsets[block])
            there += 1
    return there, left


@part
def _dearest(waiting: Ints, left: int, costs: Ints, factors: Ints) -> int:
    """Takes the dearest block out of those that wait."""
    at = 0
    for k in range(1, left):
        if costs[waiting[k]] * factors[waiting[k]] > costs[waiting[at]] * factors[waiting[at]]:
            at = k
    block = waiting[at]
    waiting[at] = waiting[left - 1]
    return int(block)


@part
def _look_beside(spans: Ints, block: int, placed: Ints, there: int, beside: Ints) -> int:
    """Writes down what lives when ``block`` does; returns how many."""
    start, end = spans[0, block], spans[1, block]
    near = 0
    for k in range(there):
        if placed[START, k] < end and placed[END, k] > start:
            beside[WHO, near] = placed[BLOCK, k]
            beside[FROM, near] = placed[LOW, k]
            beside[TO, near] = placed[HIGH, k]
            near += 1
    return near


@part
def _lowest_gap(beside: Ints, near: int, size: int, height: int) -> int:
    """The lowest place with room for ``size``; ``WAITS`` without one."""
    top = 0
    for k in range(near):
        if size <= beside[FROM, k] - top:
            return int(top)
        top = max(top, beside[TO, k])
    return int(top) if top + size <= height else WAITS


@part
def _weigh(beside: Ints, near: int, costs: Ints, factors: Ints) -> None:
    """Sums up what the blocks beside cost, by their first bytes and by their last ones."""
    for k in range(near):
        beside[BY_END, k] = k
    step = near // 2
    while step:  # Shell's sort: it needs no further room
        for k in range(step, near):
            item, at = beside[BY_END, k], k
            while at >= step and beside[TO, beside[BY_END, at - step]] > beside[TO, item]:
                beside[BY_END, at] = beside[BY_END, at - step]
                at -= step
            beside[BY_END, at] = item
        step //= 2
    below = ended = 0
    for k in range(near):
        beside[COST_BELOW, k], beside[COST_ENDED, k] = below, ended
        block, other = beside[WHO, k], beside[WHO, beside[BY_END, k]]
        below += costs[block] * factors[block]
        ended += costs[other] * factors[other]
    beside[COST_BELOW, near], beside[COST_ENDED, near] = below, ended


@part
def _cheapest_place(beside: Ints, near: int, size: int, height: int, cheapest: Ints) -> int:
    """The place whose blocks cost least, one of the cheapest by lot: on another's end, or right below another."""
    cheapest[TIES] = 0
    begun = 0
    for k in range(near + 1):  # on the end of the k-th to end, or at the bottom
        place = beside[TO, beside[BY_END, k - 1]] if k else 0
        if place + size > height:
            break
        while begun < near and beside[FROM, begun] < place + size:
            begun += 1
        _offer(beside[COST_BELOW, begun] - beside[COST_ENDED, k], place, cheapest)
    over = 0
    for k in range(near + 1):  # below the k-th to begin, or below the height
        place = (beside[FROM, k] if k < near else height) - size
        while over < near and beside[TO, beside[BY_END, over]] <= place:
            over += 1
        if place >= 0:
            _offer(beside[COST_BELOW, k] - beside[COST_ENDED, over], place, cheapest)
    return int(cheapest[PLACE])


@part
def _offer(cost: int, place: int, cheapest: Ints) -> None:
    """Takes a place that is cheaper, or by lot one that is as cheap."""
    if cheapest[TIES] == 0 or cost < cheapest[COST]:
        cheapest[COST], cheapest[PLACE], cheapest[TIES] = cost, place, 1
    elif cost == cheapest[COST]:
        cheapest[TIES] += 1
        if _lot(cheapest) % cheapest[TIES] == 0:
            cheapest[PLACE] = place


@part
def _lot(cheapest: Ints) -> int:
    """The next random number, of 23 bits."""
    cheapest[STATE] = (cheapest[STATE] * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
    return int(cheapest[STATE] >> 8)


@part
def _eject(spans: Ints, block: int, place: int, placed: Ints, there: int, waiting: Ints, left: int) -> tuple[int, int]:
    """Has all wait that lie where ``block`` is put; (how many are placed, how many wait) then."""
    start, end, top = spans[0, block], spans[1, block], place + spans[2, block]
    kept = 0
    for k in range(there):
        if placed[START, k] < end and placed[END, k] > start and placed[LOW, k] < top and placed[HIGH, k] > place:
            waiting[left] = placed[BLOCK, k]
            left += 1
            continue
        if kept < k:
            for row in range(ROWS):
                placed[row, kept] = placed[row, k]
        kept += 1
    return kept, left
