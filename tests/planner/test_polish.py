"""Local search over schedules: never worse, within the budget, and on tiny steps the best there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.polish import least_peak_bytes, polish
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import Candidate, least_step_s, simulate, try_decisions
from tests.depth import tries
from tests.planner.oracle import best_schedule
from tests.planner.plans import assert_judged, budget_at, random_decisions
from tests.planner.random_profiles import QUICK, profiles, unet_like
from tests.planner.tiny_profiles import tiny_budget, tiny_profile
from tests.planner.toys import MB, replay_beside_a_copy, small_from_large

KEEP, SWAP, RECOMPUTE = Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE


def polished(problem: Problem, wish: list[Decision], budget_bytes: int) -> Candidate:
    start = try_decisions(problem, "test", wish, budget_bytes)
    return polish(problem, start, budget_bytes, Allowance(evaluations=2000))


# -- by hand ---------------------------------------------------------------------------------------


def test_a_replay_fills_the_wait_for_a_copy_back() -> None:
    problem = build_problem(replay_beside_a_copy())
    wish = [KEEP] * problem.value_count
    wish[:2] = [RECOMPUTE, SWAP]
    found = polished(problem, wish, int(5.5 * MB))
    assert found.simulation.step_s == pytest.approx(9 + 2)
    assert found.peak_bytes <= 5.5 * MB


def test_an_early_replay_brings_decisions_within_the_budget() -> None:
    problem = build_problem(small_from_large())
    budget = int(12.5 * MB)
    wish = [RECOMPUTE if name == "small1/out1" else KEEP for name in problem.names]
    assert try_decisions(problem, "test", wish, budget).peak_bytes > budget
    found = polished(problem, wish, budget)
    assert found.peak_bytes <= budget
    assert found.simulation.step_s == pytest.approx(14 + 1)


# -- against the oracle ----------------------------------------------------------------------------

CLASSES = {
    "an early replay fills a wait": [8, 37, 63, 113, 338, 431, 521],
    "a value leaves after the replay it serves": [134, 365, 477, 525, 861],
    "the queue outwards in another order": [270, 277, 613],
    "the order of prefetches": [446],
    "an early replay frees what it starts from": [486],
    "releases in the order of the queue": [86, 378],
}


@pytest.mark.parametrize("seed", [seed for seeds in CLASSES.values() for seed in seeds[: tries(1, 100)]])
def test_where_only_the_schedule_was_missing_the_plan_is_the_best_there_is(seed: int) -> None:
    profile = tiny_profile(seed)
    budget = tiny_budget(profile, seed)
    plan_s = plan(profile, budget, evaluations=20000).prediction.step_s
    found = best_schedule(build_problem(profile), budget, at_most_s=plan_s)
    assert found is not None
    assert plan_s == pytest.approx(found.step_s, rel=1e-6)


# -- for any decisions -----------------------------------------------------------------------------


@settings(QUICK, max_examples=tries(15, 200))
@given(profile=profiles(12), seed=st.integers(0, 2**32), share=st.floats(0.0, 1.0))
def test_polishing_never_loses_and_the_checker_carries_the_schedule_out(
    profile: Profile, seed: int, share: float
) -> None:
    problem = build_problem(profile)
    budget = budget_at(profile, share)
    start = try_decisions(problem, "test", random_decisions(problem, seed), budget)
    found = polish(problem, start, budget, Allowance(evaluations=120))
    assert found.rank(budget)[:2] <= start.rank(budget)[:2]
    assert found.wish == start.wish
    assert_judged(profile, found.schedule, found.simulation)
    assert simulate(problem, found.schedule).step_s == found.simulation.step_s
    assert found.simulation.step_s >= least_step_s(problem, found.schedule.decisions) - 1e-9
    assert found.simulation.peak_bytes >= least_peak_bytes(problem, found.schedule.decisions)


def test_without_evaluations_the_schedule_stays() -> None:
    problem = build_problem(unet_like(2))
    budget = smallest_budget(unet_like(2))
    start = try_decisions(problem, "test", random_decisions(problem, 1), budget)
    assert polish(problem, start, budget, Allowance(evaluations=0)) is start
