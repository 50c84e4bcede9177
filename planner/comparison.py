"""All policies on one profile and budget, judged by the same simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import Candidate, simulated

from .planning import ILP


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one policy's plan does within one budget."""

    policy: str
    peak_bytes: int
    """Most live bytes at any moment, the first step included."""
    fits: bool
    step_s: float
    overhead: float
    """Simulated step time over in-core step time, minus 1."""
    stall_s: float
    replay_s: float
    interference_s: float
    moved_bytes: int
    """Over the link, out and in together."""
    ilp_margin: float | None
    """By how much of the in-core step the ILP's plan is faster; None where this one does not fit."""
    wall_s: float
    """Seconds it took to decide."""


def all_policies() -> tuple[str, ...]:
    """Names of the policies that are compared: the ILP first."""
    return (ILP, *policy_names())


def compare_policies(profile: Profile, made: Plan) -> tuple[ComparisonRow, ...]:
    """What every policy makes of the profile and the budget of ``made``, the ILP's plan: a row each, those that fit
    first, the fastest first.
    """
    given = PolicyInput.of(profile, made.budget_bytes)
    ilp = simulated(given.problem, ILP, schedule_of(made, given.problem))
    scale_s = made.prediction.in_core_step_s or 1.0

    def row(found: Candidate, wall_s: float) -> ComparisonRow:
        simulation, fits = found.simulation, given.fits(found)
        return ComparisonRow(
            policy=found.policy,
            peak_bytes=found.peak_bytes,
            fits=fits,
            step_s=simulation.step_s,
            overhead=simulation.step_s / scale_s - 1,
            stall_s=simulation.stall_s,
            replay_s=simulation.replay_s,
            interference_s=simulation.interference_s,
            moved_bytes=simulation.out_bytes + simulation.in_bytes,
            ilp_margin=(simulation.step_s - ilp.simulation.step_s) / scale_s if fits else None,
            wall_s=wall_s,
        )

    rows = [row(ilp, made.solve.wall_s)]
    for name in policy_names():
        started_s = time.perf_counter()
        found = run_policy(name, given)
        rows.append(row(found, time.perf_counter() - started_s))
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step_s if row.fits else row.peak_bytes)))
