"""A random program whose steps are served from an arena: whatever it does, it trains bitwise as in-core.

Its steps run twice over, so that those which are not the planned one come behind some that are served. The smallest
blocks lie in the arena too, and it may be of any size: places are what is tried here, not budgets.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from poochplan.formats.plan import Layout
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES

from .drawing import Program
from .training import Snapshot
from .trial import SERVED, Outcome, Run, Tried, prepared, trial_of

ANY_BYTES = 1 << 40


def served_trial(program: Program) -> Outcome:
    """Every plan of the program, each in a session that serves from an arena."""
    return trial_of(replace(program, events=program.events * 2), _served)


def _served(program: Program) -> tuple[list[Run], list[Snapshot]]:
    plans, reference = prepared(program)
    return [(with_layout(tried), SERVED) for tried in plans], reference


def with_layout(tried: Tried) -> Tried:
    """The plan with room for any arena, which a step of its own lays out."""
    layout = Layout(arena_bytes=0, least_bytes=LEAST_COUNTED_BYTES, places=())
    prediction = msgspec.structs.replace(tried.plan.prediction, arena_bytes=0, arena_peak_bytes=0)
    plan = msgspec.structs.replace(tried.plan, layout=layout, prediction=prediction, budget_bytes=ANY_BYTES)
    return replace(tried, plan=plan)
