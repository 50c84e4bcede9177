"""BOUND with decisions fixed: no plan with these decisions, within the budget that is its own peak, is shorter."""

from __future__ import annotations

import math
import random

import pytest

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.judge.candidate import ON_DEMAND, STYLES, movable, try_style
from poochplan.planner.judge.simulate import simulate
from poochplan.planner.model.relaxation import Relaxation
from poochplan.planner.model.solvers import Limits, SolverStatus
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.schedule import Schedule
from tests.depth import seeds
from tests.planner.plans import random_decisions, random_tuning
from tests.planner.random_profiles import random_profile, with_random_thread
from tests.planner.tiny_profiles import tiny_budget, tiny_profile
from tests.planner.toys import MB, one_value

LIMITS = Limits(60)
ROUNDING = 1e-9


def profile_of(seed: int) -> Profile:
    """A tiny step or a random one, with a thread whose work takes time or without."""
    profile = tiny_profile(seed, 2, 8) if seed % 2 else random_profile(seed, 4 + seed % 20)
    return with_random_thread(profile, seed) if seed % 3 else profile


def plan_of(problem: Problem, seed: int) -> Schedule:
    """Random decisions as some style and tuning carry them out: every schedule fits the budget that is its peak."""
    rng = random.Random(f"plan {seed}")
    decisions = random_decisions(problem, seed)
    style = rng.choice([*STYLES, ON_DEMAND])
    room = problem.base_bytes.max() + rng.random() * problem.rounded_bytes.sum()
    if rng.random() < 0.5:
        return try_style(problem, "random", decisions, int(room), style).schedule
    return try_style(problem, "random", decisions, int(room), style, random_tuning(problem, seed)).schedule


def decided(schedule: Schedule) -> list[Decision]:
    """The decisions of a schedule; what never leaves is as good as kept."""
    released = {value for action in schedule.actions for value in action.release}
    return [
        Decision.KEEP if decision is Decision.SWAP and value not in released else decision
        for value, decision in enumerate(schedule.decisions)
    ]


@pytest.mark.parametrize("seed", seeds(60, 2000))
def test_no_plan_is_below_the_bound_of_its_own_decisions_and_peak(seed: int) -> None:
    problem = build_problem(profile_of(seed))
    schedule = plan_of(problem, seed)
    plan = simulate(problem, schedule)
    relaxation = Relaxation(problem, max(plan.peak_bytes, plan.first_step_peak_bytes))
    fixed = dict(enumerate(decided(schedule)))
    free = relaxation.solve({}, LIMITS).bound_s
    half = relaxation.solve({v: d for v, d in fixed.items() if v % 2}, LIMITS).bound_s
    whole = relaxation.solve(fixed, LIMITS).bound_s
    assert free <= half * (1 + ROUNDING)
    assert half <= whole * (1 + ROUNDING)
    assert whole <= plan.step_s * (1 + ROUNDING)


def test_a_relaxation_forgets_what_was_fixed_before() -> None:
    problem = build_problem(tiny_profile(3))
    relaxation = Relaxation(problem, tiny_budget(tiny_profile(3), 3))
    free = relaxation.solve({}, LIMITS)
    for value in movable(problem):
        alone = Relaxation(problem, tiny_budget(tiny_profile(3), 3)).solve({value: Decision.KEEP}, LIMITS)
        assert relaxation.solve({value: Decision.KEEP}, LIMITS).bound_s == pytest.approx(alone.bound_s)
    assert relaxation.solve({}, LIMITS).bound_s == pytest.approx(free.bound_s)


def test_shares_add_up_and_are_those_that_were_fixed() -> None:
    problem = build_problem(tiny_profile(5))
    value = movable(problem)[0]
    found = Relaxation(problem, 2**40).solve({value: Decision.SWAP}, LIMITS)
    assert found.keep is not None
    assert found.swap is not None
    assert found.recompute is not None
    assert found.keep + found.swap + found.recompute == pytest.approx([1.0] * problem.value_count)
    assert found.swap[value] == pytest.approx(1.0)


def test_decisions_that_no_plan_can_have_within_the_budget_have_an_infinite_bound() -> None:
    problem = build_problem(one_value(3, opaque=True))
    relaxation = Relaxation(problem, int(5.5 * MB))
    kept = relaxation.solve({movable(problem)[0]: Decision.KEEP}, LIMITS)
    assert (kept.bound_s, kept.status) == (math.inf, SolverStatus.INFEASIBLE)
    assert relaxation.solve({}, LIMITS).bound_s < math.inf
