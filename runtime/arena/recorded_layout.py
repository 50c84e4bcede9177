"""A layout of a run as it was: which of its blocks lies where in one arena, from the log of what it allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.runtime.allocator.allocation_log import MARK, Table, lifetimes
from poochplan.runtime.allocator.arena import Places

RUN_END = -1
"""The mark where a run is over; all others are points of its clock."""


class Pack(Protocol):
    """Finds places; the runtime does not know how."""

    def __call__(self, blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes; if it can be, no more
        than ``room_bytes``.
        """


@dataclass(frozen=True, eq=False)
class RecordedLayout:
    """Where the blocks of a run lie."""

    places: Places
    arena_bytes: int
    least_bytes: int
    """Smaller blocks have no place."""
    outside_bytes: int
    """Of the blocks that outlive the run, as they are asked for."""
    separate_bytes: int
    """Of the blocks in the arena, each with a place of its own."""
    live_bytes: int
    """Most of them that live at once: no arena is smaller."""


def recorded_blocks(events: Table, least_bytes: int) -> Table:
    """The blocks of at least that size which a run took, of type :data:`LIFETIME`; ``death`` -1 where one outlives it.

    The log goes from the begin of a run, or its first point, to that of the next one, with the number of each point as
    its mark. Behind the run is :data:`RUN_END`: what dies between the runs dies as the log ends, for by then the next
    one has begun. Without that mark the log is of the run alone.
    """
    found = lifetimes(events, least_bytes)
    over = np.flatnonzero((events["kind"] == MARK) & (events["value"] == RUN_END))
    if not len(over):
        return found
    found = found[found["birth"] < over[0]]
    found["death"][found["death"] > over[0]] = len(events)
    return found


def recorded_layout(blocks: Table, least_bytes: int, pack: Pack, room_bytes: int = 0) -> RecordedLayout:
    """The layout of :func:`recorded_blocks`; those that outlive the run lie outside."""
    dies = blocks["death"] >= 0
    died = blocks[dies]
    offsets, arena_bytes = pack([tuple(row) for row in died[["birth", "death", "size_bytes"]].tolist()], room_bytes)
    places = np.full(len(blocks), OUTSIDE, np.int64)
    places[dies] = offsets
    units = -(-died["size_bytes"] // ALLOCATION_UNIT_BYTES)
    live = occupancy(int(died["death"].max(initial=0)) + 1, (died["birth"], died["death"] - 1, units))
    return RecordedLayout(
        places=Places(sizes_bytes=blocks["size_bytes"].copy(), offsets=places, points=blocks["point"].copy()),
        arena_bytes=arena_bytes,
        least_bytes=least_bytes,
        outside_bytes=int(blocks["size_bytes"][~dies].sum()),
        separate_bytes=int(units.sum()) * ALLOCATION_UNIT_BYTES,
        live_bytes=int(live.max(initial=0)) * ALLOCATION_UNIT_BYTES,
    )
