"""PagePool: pages of freed blocks stay for later ones, with all memory of the steps within a budget. No layout is needed.

It is the process's, because memory is. Only threads that run steps are served, and only their blocks count.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from poochplan.formats.profile_parts import counted_bytes
from poochplan.runtime.arena.library import library
from poochplan.runtime.metering.allocated import joined_count
from poochplan.runtime.metering.census import census

SWITCH = "POOCHPLAN_POOL"
"""An internal switch for comparisons: bytes of the pieces that are moved where whole huge pages do not do; 0 is off. Behind a comma: the least bytes
of a block from the pool."""
LEAST_BYTES = 16 << 10


class PoolCounts(NamedTuple):
    """Bytes now and the most since :meth:`PagePool.reset_peak`; the rest since the process began."""

    live_bytes: int
    free_bytes: int
    peak_bytes: int
    limit_bytes: int
    blocks: int
    exact: int
    """Blocks that took a free range of their size."""
    split: int
    composed: int
    """Blocks that were made of pages from several free ranges."""
    moves: int
    moved_bytes: int
    fresh_bytes: int
    given_back_bytes: int
    mappings: int
    most_mappings: int
    emptied: int
    """Number of times that there were too many mappings."""


def pool_of_session(device: str) -> PagePool | None:
    piece_bytes, _, least_bytes = (os.environ.get(SWITCH) or "0").partition(",")
    if not int(piece_bytes) or device != "cpu":
        return None
    return PagePool(int(piece_bytes), int(least_bytes or LEAST_BYTES))


class PagePool:
    """State: new, open or closed; and the bytes beside it when it was opened."""

    def __init__(self, piece_bytes: int, least_bytes: int) -> None:
        self._kinds, self._limit_bytes = (piece_bytes, least_bytes), 0
        self._beside_bytes: int | None = None

    def within(self, budget_bytes: int) -> None:
        """Steps of this thread take their blocks from here, within the budget; idempotent."""
        count = joined_count()
        assert count is not None, "the switch asks for the compiled allocator"
        if self._beside_bytes is None:
            there = [one for one in census("cpu", 1).values() if not count.library.is_served(one.data_ptr())]
            self._beside_bytes = sum(counted_bytes(one.nbytes()) for one in there) - count.outside_live_bytes
        if budget_bytes != self._limit_bytes:
            self._limit_bytes = budget_bytes
            count.library.pool_open(count.handle, budget_bytes - self._beside_bytes, *self._kinds)

    def close(self) -> None:
        """Free pages go back to the system now, and those of live blocks when they die."""
        if self._beside_bytes is not None:
            library().pool_close()


def counts() -> PoolCounts:
    found = np.zeros(len(PoolCounts._fields), np.int64)
    library().pool_counts(found.ctypes.data)
    return PoolCounts(*found.tolist())
