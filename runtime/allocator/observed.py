"""A step's blocks as they were: from the log of one step to what a layout is made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .allocation_log import MARK, Table, lifetimes

STEP_END = -1
"""The mark where a step is over; all others are points of the runtime's clock."""


class ObservedBlock(NamedTuple):
    """One block that a step took behind its first point."""

    point: int
    """Points of the clock that had been passed when it was taken."""
    size_bytes: int
    """As asked for."""
    start: int
    """Position in the log."""
    end: int
    """The same; 0 where it had not died when the log ended."""


def observed_blocks(events: Table, least_bytes: int) -> list[ObservedBlock]:
    """Those of at least that size, in the order in which they were taken.

    The log goes from a step's first point to that of the next step, with the number of each point as its mark, and
    ``STEP_END`` behind the step. What dies between the steps dies as the log ends: by then the next step has begun.
    """
    over = np.flatnonzero((events["kind"] == MARK) & (events["value"] == STEP_END))
    if not len(over):
        return []
    found = lifetimes(events, least_bytes)
    found = found[(found["birth"] < over[0]) & (found["point"] > 0)]
    ends = np.where(found["death"] > over[0], len(events), np.maximum(found["death"], 0))
    rows = zip(
        found["point"].tolist(), found["size_bytes"].tolist(), found["birth"].tolist(), ends.tolist(), strict=True
    )
    return [ObservedBlock(*row) for row in rows]
