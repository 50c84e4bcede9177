"""What plans are made from and what is told of them: stored instances, budgets by share, decisions, overheads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poochplan import Plan, Profile
from poochplan.formats.occupancy import static_bytes
from poochplan.planner import smallest_budget
from poochplan.planner.policies import PolicyInput, run_policy

INSTANCES = Path(__file__).resolve().parent / "instances"


def stored(name: str) -> Profile:
    """The instance of that name and device."""
    return Profile.load(INSTANCES / f"{name}.json.gz")


def budget_of(profile: Profile, kept: float) -> int:
    """The budget that keeps ``kept`` of what decisions can move."""
    smallest = smallest_budget(profile)
    return int(smallest + kept * max(0, profile.in_core_peak_bytes - smallest))


def part_budget(profile: Profile, divisor: int) -> int:
    """In-core less all but one part in ``divisor`` of what is not there all step long, or the least that has a plan."""
    static = sum(static_bytes(profile).values())
    return max(static + (profile.in_core_peak_bytes - static) // divisor, smallest_budget(profile))


def decisions_of(plan: Plan) -> dict[str, int]:
    decisions = [str(value.decision) for value in plan.values]
    return {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")}


def predicted(plan: Plan, *names: str) -> dict[str, Any]:
    """These of its predictions, by their names."""
    return {name: getattr(plan.prediction, name) for name in names}


def costs_of(plan: Plan) -> dict[str, float | None]:
    """Overhead and bound as shares of the in-core step, the gap, and the seconds that it took to solve."""
    solve = plan.solve
    return predicted(plan, "overhead") | {"bound": plan.bound_overhead, "gap": solve.gap, "wall_s": solve.wall_s}


def policy_overhead(name: str, given: PolicyInput) -> float | None:
    """Of the plan of a policy, as a share of the in-core step; None where it does not fit."""
    found = run_policy(name, given)
    return found.simulation.step_s / given.problem.in_core_s - 1 if found.peak_bytes <= given.budget_bytes else None
