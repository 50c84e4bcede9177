"""All policies on one profile and budget, judged by the same simulator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.policies.registry import unknown_policy
from poochplan.planner.problem.problem import Problem
from poochplan.planner.simulator.candidate import Candidate
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import simulate

from .planning import ILP, plan


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
    """By how much of the in-core step the ILP's plan is faster; None where this one does not fit, or no ILP ran."""


def all_policies() -> tuple[str, ...]:
    """Names that :func:`compare_policies` knows: the ILP first."""
    return (ILP, *policy_names())


def compare_policies(
    profile: Profile,
    budget_bytes: int,
    names: Iterable[str] | None = None,
    *,
    ilp_plan: Plan | None = None,
    seconds: dict[str, float] | None = None,
) -> dict[str, Candidate]:
    """Each policy's plan by its name, in the order of ``names`` (all policies, when it is None).

    A plan may be over the budget: ``Candidate.peak_bytes`` says so. ``ilp_plan`` is an ILP plan that was already made
    for this profile and budget; without it, ``"ilp"`` among the names makes one. ``seconds`` receives how long each
    policy took to decide.

    Raises
    ------
    InfeasibleError
        ``"ilp"`` is among the names and no plan at all fits the budget.
    UsageError
        A name is unknown.
    """
    wanted = all_policies() if names is None else tuple(names)
    for name in wanted:
        if name not in all_policies():
            raise unknown_policy(name)
    given = PolicyInput.of(profile, budget_bytes)
    found = {}
    for name in wanted:
        started_s = time.perf_counter()
        if name == ILP:
            found[name] = candidate_of(ilp_plan or plan(profile, budget_bytes), given.problem)
        else:
            found[name] = run_policy(name, given)
        if seconds is not None:
            seconds[name] = ilp_plan.solve.wall_s if name == ILP and ilp_plan else time.perf_counter() - started_s
    return found


def candidate_of(made: Plan, problem: Problem) -> Candidate:
    """A plan as a candidate again; ``problem`` is of the profile it was made from."""
    schedule = schedule_of(made, problem)
    return Candidate(made.solve.policy, schedule.decisions, schedule, simulate(problem, schedule))


def comparison_rows(
    candidates: dict[str, Candidate], budget_bytes: int, in_core_step_s: float
) -> tuple[ComparisonRow, ...]:
    """One row per candidate, those that fit first, the fastest first."""
    ilp = candidates.get(ILP)
    rows = []
    for name, candidate in candidates.items():
        simulation = candidate.simulation
        fits = candidate.peak_bytes <= budget_bytes
        scale_s = in_core_step_s or 1.0
        rows.append(
            ComparisonRow(
                policy=name,
                peak_bytes=candidate.peak_bytes,
                fits=fits,
                step_s=simulation.step_s,
                overhead=simulation.step_s / scale_s - 1,
                stall_s=simulation.stall_s,
                replay_s=simulation.replay_s,
                interference_s=simulation.interference_s,
                moved_bytes=simulation.out_bytes + simulation.in_bytes,
                ilp_margin=(simulation.step_s - ilp.simulation.step_s) / scale_s if ilp and fits else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step_s if row.fits else row.peak_bytes)))
