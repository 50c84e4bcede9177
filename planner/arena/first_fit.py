"""First fit: blocks in a given order, each at the lowest place that is free for its whole life.

Compiled where numba is installed; the same lines are the specification, and run as plain Python without it.
"""

from __future__ import annotations

import numpy as np

from poochplan.planner.evaluator.compiled import compiled, part
from poochplan.planner.problem.arrays import Ints

BLOCK, START, END, LOW, HIGH = range(5)
"""Rows of what is placed, a column each: number, first time, time after the last, first byte, byte after the last."""
ROWS = 5


@compiled
def first_fit(spans: Ints, order: Ints) -> Ints:
    """The offset of each block; int64, (blocks,).

    ``spans`` has a column for each block and the rows start, end, size; int64, (3, blocks). ``order`` names each block
    once. The bytes are counted in any unit: offsets are sums of sizes.
    """
    offsets = np.zeros(len(order), dtype=np.int64)
    placed = np.empty((ROWS, len(order) + 1), dtype=np.int64)
    for count in range(len(order)):
        block = order[count]
        offset = 0
        for k in range(count):
            if placed[START, k] < spans[1, block] and placed[END, k] > spans[0, block]:
                if placed[LOW, k] - offset >= spans[2, block]:
                    break
                offset = max(offset, placed[HIGH, k])
        put(placed, count, spans, block, offset)
        offsets[block] = offset
    return offsets


@part
def put(placed: Ints, count: int, spans: Ints, block: int, offset: int) -> None:
    """Adds a block to the ``count`` that are placed, which lie in the order of their first bytes."""
    at, after = 0, count
    while at < after:
        middle = (at + after) // 2
        if placed[LOW, middle] < offset:
            at = middle + 1
        else:
            after = middle
    for row in range(ROWS):
        for k in range(count, at, -1):
            placed[row, k] = placed[row, k - 1]
    placed[BLOCK, at] = block
    placed[START, at] = spans[0, block]
    placed[END, at] = spans[1, block]
    placed[LOW, at] = offset
    placed[HIGH, at] = offset + spans[2, block]
