"""A pass as it was: which of its blocks lies where in one arena, from the log of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, LEAST_PLACED_BYTES
from poochplan.runtime.allocator.allocation_log import Table, lifetimes
from poochplan.runtime.allocator.arena import Places
from poochplan.runtime.learning.lessons import Pack

MOST_BLOCKS = 20_000
"""Passes with more have no layout."""
Call = tuple[str, int]
"""A part of the model by its path, and how often it had been called in the pass."""


@dataclass(frozen=True)
class PassLayout:
    """What a pass takes of an arena."""

    places: Places
    arena_bytes: int
    separate_bytes: int
    """Of the blocks in the arena, each with a place of its own."""
    live_bytes: int
    """Most of them that live at once: no arena is smaller."""
    points: Mapping[Call, int]
    """The clock at each call of a part: from 1 on, in order."""

    def layer(self, point: int) -> str:
        """The part that was called last; empty before the first."""
        return next((path for (path, _), at in self.points.items() if at == point), "")


def pass_layout(events: Table, points: Mapping[Call, int], pack: Pack) -> PassLayout | None:
    """The layout of the pass that the log is of, with the points as marks. None where it has too many blocks.

    What has not died when the log ends lies outside: what the pass returns, and what somebody keeps.
    """
    found = lifetimes(events, LEAST_PLACED_BYTES)
    if len(found) > MOST_BLOCKS:
        return None
    died = found[found["death"] >= 0]
    units = -(-died["size_bytes"] // ALLOCATION_UNIT_BYTES)
    spans = [tuple(row) for row in died[["birth", "death", "size_bytes"]].tolist()]
    offsets, arena_bytes = pack(spans, 0)
    places = np.full(len(found), OUTSIDE, np.int64)
    places[found["death"] >= 0] = offsets
    live = occupancy(len(events), (died["birth"], died["death"] - 1, units))
    return PassLayout(
        places=Places(sizes_bytes=found["size_bytes"].copy(), offsets=places, points=found["point"].copy()),
        arena_bytes=arena_bytes,
        separate_bytes=int(units.sum()) * ALLOCATION_UNIT_BYTES,
        live_bytes=int(live.max(initial=0)) * ALLOCATION_UNIT_BYTES,
        points=dict(points),
    )
