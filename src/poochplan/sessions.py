"""Sessions with all that they may ask for: here runtime and planner meet, which do not know each other."""

from __future__ import annotations

import functools
from typing import Any

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.applying import apply as runtime_apply
from poochplan.runtime.session import Session

from .packing_apart import packed

REPLAN_S = 10.0
"""Seconds that the search for a new plan may take while the training waits."""


@functools.wraps(runtime_apply)
def apply(*args: Any, **kwargs: Any) -> Session:
    return runtime_apply(*args, **({"replanner": replanned, "pack": packed} | kwargs))


def replanned(profile: Profile, plan: Plan, beside_bytes: int) -> Plan:
    """A plan for the budget of ``plan``, from its profile with so many more bytes beside the step.

    It is searched for as long as ``plan`` was, and at most :data:`REPLAN_S`. Raises ``InfeasibleError``.
    """
    from poochplan.planner.planning import plan as make_plan  # here: training needs none of what planning loads
    from poochplan.planner.whatif import with_bytes_beside

    changed = with_bytes_beside(profile, beside_bytes)
    seconds = min(REPLAN_S, max(1.0, plan.solve.wall_s))
    return make_plan(changed, plan.budget_bytes, time_limit_s=seconds, workload=plan.workload, seed=plan.solve.seed)
