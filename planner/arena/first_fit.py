"""First fit: blocks in a given order, each at the lowest place that is free for its whole life."""

from __future__ import annotations

from bisect import insort_left

import numpy as np

from poochplan.planner.evaluator.evaluator_library import address, library
from poochplan.planner.problem.arrays import Ints


def first_fit(spans: Ints, order: Ints) -> Ints:
    """The offset of each block; int64, (blocks,).

    ``spans`` has a column for each block and the rows start, end, size; int64, (3, blocks). ``order`` names each block
    once. The bytes are counted in any unit: offsets are sums of sizes.
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
