"""Sessions with all that they may ask for: here runtime and planner meet, which do not know each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.applying import apply as runtime_apply
from poochplan.runtime.session import Session

REPLAN_S = 10.0
"""Seconds that the search for a new plan may take while the training waits."""
MOST_LOOKS = 400_000_000
"""Looks that a second search for places may take while the training waits: a second or two, three times at most. In six
plans of three networks they were enough for the arena that was planned, and a quarter of them for 0.5% more."""


@functools.wraps(runtime_apply)
def apply(*args: Any, **kwargs: Any) -> Session:
    return runtime_apply(*args, **({"replanner": replanned, "pack": packed} | kwargs))


def packed(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
    """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes. It is searched for as long
    as a plan's is; where that is larger than ``room_bytes``, for an arena of those, with ``MOST_LOOKS``.
    """
    from poochplan.planner.arena.packing import Block, pack
    from poochplan.planner.arena.step_layout import LOOKS_PER_BLOCK

    every = [Block(*block) for block in blocks]
    found = pack(every, LOOKS_PER_BLOCK * len(every))
    if found.arena_bytes > room_bytes >= found.lower_bound_bytes:
        found = pack(every, MOST_LOOKS, enough_bytes=room_bytes)
    return found.offsets, found.arena_bytes


def replanned(profile: Profile, plan: Plan, beside_bytes: int) -> Plan:
    """A plan for the budget of ``plan``, from its profile with so many more bytes beside the step.

    It is searched for as long as ``plan`` was, and at most :data:`REPLAN_S`. Raises ``InfeasibleError``.
    """
    from poochplan.planner.planning import plan as make_plan  # here: training needs none of what planning loads
    from poochplan.planner.whatif import with_bytes_beside

    changed = with_bytes_beside(profile, beside_bytes)
    seconds = min(REPLAN_S, max(1.0, plan.solve.wall_s))
    return make_plan(changed, plan.budget_bytes, time_limit_s=seconds, workload=plan.workload, seed=plan.solve.seed)
