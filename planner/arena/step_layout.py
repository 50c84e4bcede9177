"""The layout of a planned step: which of its blocks lies where in one arena, and what lies outside."""

from __future__ import annotations

from dataclasses import dataclass

from poochplan.formats.plan import OUTSIDE, Decision, Layout, Place
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule

from .blocks import blocks_of
from .packing import LOOKS_PER_BLOCK, live_peak, pack

MOST_BLOCKS = 20_000
"""With more than these an arena is not worked out along with a plan: that would take longer than a few seconds."""
GENERATOR_STATE_BYTES = 5120
"""Recording a random op reads the generator's state, and so does its replay: it lies beside the arena for a moment."""


@dataclass(frozen=True)
class Laid:
    """A layout, and the bytes that are taken with it."""

    layout: Layout
    live_bytes: int
    """Most bytes of the arena's blocks that are live at any moment: no arena is smaller."""
    peak_bytes: int
    """The arena, and the most that lies outside at any moment, what was there before the step included."""


def layout_of(
    profile: Profile, problem: Problem, schedule: Schedule, *, enough_bytes: int = 0, room: float = 0.0
) -> Laid | None:
    """Where the blocks of a step under ``schedule`` lie; None when there are more than ``MOST_BLOCKS``.

    Packing ends early where the arena, with ``room`` as a share of it and what lies outside, is ``enough_bytes``.

    Outside lie those of less than ``LEAST_PLACED_BYTES``, those from before the first point of the clock, where a step
    is not yet told from another, and those that outlive the step. Gradients that are gone by the next forward do not.
    """
    blocks = blocks_of(profile, problem, schedule)
    if len(blocks.of_step) > MOST_BLOCKS:
        return None
    gone = set() if profile.gradients_live_through_forward else set(blocks.gradients)
    large = [
        block for block in blocks.of_step if block.size_bytes >= LEAST_PLACED_BYTES and blocks.points_before(block) > 0
    ]
    inside = [block for block in large if block.end < blocks.end or block in gone]
    is_inside = set(inside)
    outside = [block for block in blocks.of_step if block not in is_inside]
    outside_bytes = live_peak([one for one in (*blocks.before, *outside) if profile.rounded_bytes(one.size_bytes)])
    if Decision.RECOMPUTE in schedule.decisions:
        outside_bytes += GENERATOR_STATE_BYTES
    enough = max(0, int((enough_bytes - outside_bytes) / (1 + room)))
    packing = pack(inside, LOOKS_PER_BLOCK * len(inside), enough)
    offsets = iter(packing.offsets)
    places = tuple(
        Place(blocks.points_before(block), block.size_bytes, next(offsets) if block in is_inside else OUTSIDE)
        for block in large
    )
    layout = Layout(arena_bytes=packing.arena_bytes, least_bytes=LEAST_PLACED_BYTES, places=places)
    return Laid(layout, packing.lower_bound_bytes, packing.arena_bytes + outside_bytes)
