"""The exhaustive oracle against optima known by hand, and planner and polishing against the oracle."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.polish import least_peak_bytes, polish
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, least_step_s, movable, simulate, try_decisions
from tests.depth import seeds, tries
from tests.planner.clock import is_plain
from tests.planner.oracle import Freedom, Optimum, best_decisions, best_schedule
from tests.planner.plans import assert_judged, budget_at, random_decisions
from tests.planner.random_profiles import QUICK, profiles, unet_like, with_random_thread
from tests.planner.tiny_profiles import (
    MB,
    one_value,
    replay_beside_a_copy,
    small_from_large,
    tiny_budget,
    tiny_instance,
    tiny_profile,
    two_values,
)

WITHIN = 0.02
EVALUATIONS = tries(1000, 20000)
KEEP, SWAP, RECOMPUTE = Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE


def best(profile: Profile, budget_bytes: float, **options) -> Optimum:
    found = best_schedule(Problem.of(profile), int(budget_bytes), **options)
    assert found is not None
    return found


def plain_instance(seed: int, highest: int = 5) -> tuple[Profile, Problem, int]:
    """A tiny step on a link whose copies slow nothing."""
    profile, _, budget = tiny_instance(seed, 2, highest)
    plain = msgspec.structs.replace(profile.link, duplex=1.0, interference_out=0.0, interference_in=0.0)
    profile = msgspec.structs.replace(profile, link=plain)
    return profile, Problem.of(profile), budget


# -- optima known by hand --------------------------------------------------------------------------


def test_behind_a_slow_link_a_value_is_recomputed() -> None:
    found = best(one_value(seconds_per_mb=10), 5.5 * MB)
    assert found.schedule.decisions[0] is RECOMPUTE
    assert found.step_s == pytest.approx(5 + 1)


def test_a_copy_that_hides_exactly_costs_nothing_and_one_a_little_slower_costs_the_difference_twice() -> None:
    assert best(one_value(seconds_per_mb=1), 5.5 * MB).step_s == pytest.approx(5)
    slower = best(one_value(seconds_per_mb=1.25), 5.5 * MB)
    assert slower.schedule.decisions[0] is SWAP
    assert slower.step_s == pytest.approx(5 + 0.25 + 0.25)


def test_two_values_come_back_in_the_order_in_which_they_are_needed() -> None:
    found = best(two_values(seconds_per_mb=2), 5.5 * MB)
    assert found.schedule.decisions[:2] == (SWAP, SWAP)
    assert [value for action in found.schedule.actions for value in action.prefetch if value in (0, 1)] == [1, 0]
    assert found.step_s == pytest.approx(12 + 1)  # y has 1 s to come back in, x then 2 s


def test_an_early_replay_lets_go_of_the_larger_value_it_starts_from() -> None:
    profile = small_from_large()
    found = best(profile, 12.5 * MB)
    small = [value for value, decision in enumerate(found.schedule.decisions) if decision is RECOMPUTE]
    assert found.step_s == pytest.approx(14 + 1)
    assert [Problem.of(profile).names[value] for value in small] == ["small1/out1"]
    late = best(profile, 12.5 * MB, freedom=Freedom(early_replay=False))
    assert late.step_s > found.step_s + 10


def test_a_budget_below_the_smallest_has_no_schedule_and_the_in_core_peak_costs_nothing() -> None:
    for seed in range(5):
        profile, problem, _ = tiny_instance(seed, 2, 4)
        assert best_schedule(problem, smallest_budget(profile) - 1) is None
        assert best(profile, profile.in_core_peak_bytes).step_s == pytest.approx(problem.step_s)


# -- the oracle against itself and the checker -----------------------------------------------------


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("seed", range(300, 300 + tries(3, 20)))
def test_the_rules_of_the_plain_link_lose_nothing_against_every_choice(seed: int, has_thread: bool) -> None:
    """On the CPU, where what the launching thread takes is spent on the compute stream."""
    profile, problem, budget = plain_instance(seed, 4)
    if has_thread:
        problem = Problem.of(msgspec.structs.replace(with_random_thread(profile, seed), device=profile.device))
    assert is_plain(problem.link)
    by_rules, every = best_schedule(problem, budget), best_schedule(problem, budget, every_choice=True)
    assert by_rules is not None
    assert every is not None
    assert by_rules.step_s == pytest.approx(every.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(400, 400 + tries(4, 30)))
def test_the_independent_checker_carries_the_best_schedule_out_within_the_budget(seed: int) -> None:
    profile, _, budget = plain_instance(seed)
    found = best(profile, budget)
    assert assert_judged(profile, found.schedule, found.simulation).peak_bytes <= budget


def test_less_freedom_is_never_faster() -> None:
    for seed in range(500, 500 + tries(3, 20)):
        profile, problem, budget = plain_instance(seed)
        free = best(profile, budget).step_s
        for freedom in (Freedom(early_replay=False), Freedom(out_order=False), Freedom(prefetch_order=False)):
            bound = best_schedule(problem, budget, freedom=freedom)
            assert bound is None or bound.step_s >= free * (1 - 1e-9)


# -- the planner against the oracle ----------------------------------------------------------------


STEPS = [*((seed, False) for seed in seeds(day=8, deep=100)), *((seed, True) for seed in seeds(day=24, deep=300))]


@pytest.mark.parametrize(("seed", "has_thread"), STEPS)
def test_the_plan_is_near_the_best_of_all_schedules_and_never_better_and_the_bound_is_below(
    seed: int, has_thread: bool
) -> None:
    """The oracle asserts that its own clock and the simulator agree on its best schedule."""
    profile = with_random_thread(tiny_profile(seed, 2, 4), seed) if has_thread else tiny_profile(seed)
    problem, budget = Problem.of(profile), tiny_budget(profile, seed)
    assert 2 <= len(movable(problem)) <= 5
    made = plan(profile, budget, evaluations=EVALUATIONS)
    found = best_schedule(problem, budget, at_most_s=made.prediction.step_s)
    assert found is not None, "the plan is better than the oracle's best: the oracle misses a schedule"
    assert made.prediction.step_s <= found.step_s * (1 + WITHIN)
    assert made.solve.bound_s is not None
    assert problem.keep_all_s * (1 - 1e-9) <= made.solve.bound_s <= found.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(day=4, deep=50))
def test_the_plan_is_near_the_best_of_all_decisions(seed: int) -> None:
    profile, problem, budget = tiny_instance(seed, 5, 8)
    plan_s = plan(profile, budget, evaluations=EVALUATIONS).prediction.step_s
    assert plan_s <= best_decisions(problem, budget).simulation.step_s * (1 + WITHIN)


def polished(problem: Problem, wish: list[Decision], budget_bytes: int) -> Candidate:
    start = try_decisions(problem, "test", wish, budget_bytes)
    return polish(problem, start, budget_bytes, Allowance(evaluations=2000))


# -- polishing, by hand ----------------------------------------------------------------------------


def test_a_replay_fills_the_wait_for_a_copy_back() -> None:
    problem = Problem.of(replay_beside_a_copy())
    wish = [KEEP] * problem.value_count
    wish[:2] = [RECOMPUTE, SWAP]
    found = polished(problem, wish, int(5.5 * MB))
    assert found.simulation.step_s == pytest.approx(9 + 2)
    assert found.peak_bytes <= 5.5 * MB


def test_an_early_replay_brings_decisions_within_the_budget() -> None:
    problem = Problem.of(small_from_large())
    budget = int(12.5 * MB)
    wish = [RECOMPUTE if name == "small1/out1" else KEEP for name in problem.names]
    assert try_decisions(problem, "test", wish, budget).peak_bytes > budget
    found = polished(problem, wish, budget)
    assert found.peak_bytes <= budget
    assert found.simulation.step_s == pytest.approx(14 + 1)


# -- polishing against the oracle ------------------------------------------------------------------

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
    found = best_schedule(Problem.of(profile), budget, at_most_s=plan_s)
    assert found is not None
    assert plan_s == pytest.approx(found.step_s, rel=1e-6)


# -- polishing any decisions -----------------------------------------------------------------------


@settings(QUICK, max_examples=tries(15, 200))
@given(profile=profiles(12), seed=st.integers(0, 2**32), share=st.floats(0.0, 1.0))
def test_polishing_never_loses_and_the_checker_carries_the_schedule_out(
    profile: Profile, seed: int, share: float
) -> None:
    problem = Problem.of(profile)
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
    problem = Problem.of(unet_like(2))
    budget = smallest_budget(unet_like(2))
    start = try_decisions(problem, "test", random_decisions(problem, 1), budget)
    assert polish(problem, start, budget, Allowance(evaluations=0)) is start
