"""A proven lower bound is never above the best plan: toys on which an unsound bound would be, and plans of all kinds.

Each toy's optimum is worked out by hand in ``toys.py`` and found again by exhaustive search. With decisions fixed, no
plan with these decisions, within the budget that is its own peak, is shorter.
"""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import highspy
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning import budget_of, instance
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.search import bound, decide
from poochplan.planner.search.bound import Relaxation, lower_bound
from poochplan.planner.search.solvers import LinearModel, SolverLimits, Warm, proven_bound
from poochplan.planner.search.time_constraints import seconds_lost
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule
from poochplan.planner.simulator.simulate import ON_DEMAND, STYLES, movable, simulate, try_style
from tests.depth import seeds, tries
from tests.planner.oracle import best_schedule
from tests.planner.plans import interfering_profile, random_decisions, random_schedule, random_tuning
from tests.planner.random_profiles import link, random_profile, with_random_thread
from tests.planner.tiny_profiles import (
    MB,
    one_value,
    out_through_backward,
    replay_beside_a_copy,
    tiny_budget,
    tiny_profile,
    two_values_of_one_op,
)

GAP = 0.01
"""Of the step time: a proof as close as this is enough."""


def assert_the_bound_holds(profile: Profile, budget_bytes: int, optimum_s: float) -> None:
    """Not above the optimum, which no plan is below; above the in-core step, which needs no proof."""
    in_core_s = Problem.of(profile).step_s
    by_the_lp_alone = plan(profile, budget_bytes, evaluations=tries(1000, 20000))
    beside_the_search = plan(profile, budget_bytes, time_limit_s=tries(5, 60), threads=2, gap=GAP)
    for found in (by_the_lp_alone, beside_the_search):
        assert found.prediction.step_s >= optimum_s * (1 - 1e-9)
        assert found.solve.bound_s is not None
        assert in_core_s * (1 - 1e-9) <= found.solve.bound_s <= optimum_s * (1 + 1e-9)
    for found, small in ((by_the_lp_alone, 1e-6), (beside_the_search, GAP)):  # a small gap ends the proof
        assert found.solve.bound_s > in_core_s or optimum_s <= in_core_s * (1 + small)


def assert_the_optimum_is(profile: Profile, budget_bytes: int, optimum_s: float) -> None:
    best = best_schedule(Problem.of(profile), budget_bytes)
    assert best is not None
    assert best.step_s == pytest.approx(optimum_s, abs=1e-3)


TOYS = {
    "a replay runs beside a copy in what would be a stall": (replay_beside_a_copy(), 5.5, 9 + 2),
    "bytes leave in the stall right before the tick that needs the room": (one_value(3, opaque=True), 5.5, 5 + 2 + 2),
    "a copy outward goes on in backward": (out_through_backward(), 8.5, 8.75),
    "one op brings back two values and is paid for once": (two_values_of_one_op(), 10.5, 9 + 3),
}


@pytest.mark.parametrize(("profile", "budget_mb", "optimum_s"), TOYS.values(), ids=TOYS)
def test_the_bound_is_not_above_the_optimum_of_a_toy(profile: Profile, budget_mb: float, optimum_s: float) -> None:
    budget_bytes = int(budget_mb * MB)
    assert_the_optimum_is(profile, budget_bytes, optimum_s)
    assert_the_bound_holds(profile, budget_bytes, optimum_s)


SLOWED = {"one way": (1.0, 0.25, 0.0), "both ways": (1.0, 0.25, 1.0), "half duplex": (0.5, 0.25, 1.0)}


@pytest.mark.parametrize(("duplex", "out", "back"), SLOWED.values(), ids=SLOWED)
def test_the_linear_program_proves_what_copies_that_hide_behind_compute_take_from_it(
    duplex: float, out: float, back: float
) -> None:
    profile = one_value(0.5, opaque=True)
    line = msgspec.structs.replace(profile.link, duplex=duplex, interference_out=out, interference_in=back)
    profile = msgspec.structs.replace(profile, link=line)
    optimum_s = 5 + 0.5 * out / (1 + out) + 0.5 * back / (1 + back)
    smallest = smallest_budget(profile)
    assert_the_optimum_is(profile, smallest, optimum_s)
    lost_s = lower_bound(Problem.of(profile), smallest, "highs", SolverLimits(60)) - 5
    lost_out, lost_in = seconds_lost(line)
    assert lost_s == pytest.approx(0.5 * (lost_out + lost_in))
    assert lost_s <= optimum_s - 5 + 1e-9


def test_two_copies_at_once_lose_no_less_than_the_row_of_time_says() -> None:
    for out, back, duplex in product((0.0, 0.2, 3.0), (0.0, 0.5), (1.0, 0.7, 0.2)):
        line = link(duplex=duplex, interference_out=out, interference_in=back)
        lost_out, lost_in = seconds_lost(line)
        assert lost_out <= out / (1 + out) + 1e-12
        assert lost_in <= back / (1 + back) + 1e-12
        assert duplex * (lost_out + lost_in) <= (out + back) / (1 + out + back) + 1e-12


@given(st.integers(0, 2**32))
@settings(deadline=None, derandomize=True, max_examples=tries(40, 1000))
def test_no_plan_whatever_is_faster_than_the_bound_for_a_budget_of_its_own_peak(seed: int) -> None:
    problem = Problem.of(interfering_profile(seed))
    found = simulate(problem, random_schedule(problem, seed))
    peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
    assert lower_bound(problem, peak_bytes, "highs", SolverLimits(60)) <= found.step_s * (1 + 1e-9)


LIMITS = SolverLimits(60)
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
    problem = Problem.of(profile_of(seed))
    schedule = plan_of(problem, seed)
    assert_no_bound_is_above(problem, schedule)


@pytest.mark.parametrize("seed", seeds(30, 2000))
def test_nor_below_the_bound_that_steps_of_many_values_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "FEW", 0)
    monkeypatch.setattr(bound, "FREE_SHARE", random.Random(seed).choice([0.0, 0.1, 0.3]))
    monkeypatch.setattr(bound, "SHORT_WINDOW", random.Random(seed).choice([1, 2, 4]))
    monkeypatch.setattr(decide, "DENSE_SHARE", 1.0)
    problem = Problem.of(profile_of(seed))
    assert_no_bound_is_above(problem, plan_of(problem, seed))


def assert_no_bound_is_above(problem: Problem, schedule: Schedule) -> None:
    """With all decisions of a plan fixed, with half of them, and with none."""
    plan = simulate(problem, schedule)
    relaxed = Relaxation(problem, max(plan.peak_bytes, plan.first_step_peak_bytes))
    fixed = dict(enumerate(decided(schedule)))
    free = relaxed.solve({}, LIMITS).bound_s
    half = relaxed.solve({v: d for v, d in fixed.items() if v % 2}, LIMITS).bound_s
    whole = relaxed.solve(fixed, LIMITS).bound_s
    assert free <= half * (1 + ROUNDING)
    assert half <= whole * (1 + ROUNDING)
    assert whole <= plan.step_s * (1 + ROUNDING)


def test_a_relaxation_forgets_what_was_fixed_before() -> None:
    problem = Problem.of(tiny_profile(3))
    relaxed = Relaxation(problem, tiny_budget(tiny_profile(3), 3))
    free = relaxed.solve({}, LIMITS)
    for value in movable(problem):
        alone = Relaxation(problem, tiny_budget(tiny_profile(3), 3)).solve({value: Decision.KEEP}, LIMITS)
        assert relaxed.solve({value: Decision.KEEP}, LIMITS).bound_s == pytest.approx(alone.bound_s)
    assert relaxed.solve({}, LIMITS).bound_s == pytest.approx(free.bound_s)


def test_shares_add_up_and_are_those_that_were_fixed() -> None:
    problem = Problem.of(tiny_profile(5))
    value = movable(problem)[0]
    found = Relaxation(problem, 2**40).solve({value: Decision.SWAP}, LIMITS)
    assert found.shares is not None
    assert found.shares.sum(axis=0) == pytest.approx([1.0] * problem.value_count)
    assert found.shares[1, value] == pytest.approx(1.0)


def test_decisions_that_no_plan_can_have_within_the_budget_have_an_infinite_bound() -> None:
    problem = Problem.of(one_value(3, opaque=True))
    relaxed = Relaxation(problem, int(5.5 * MB))
    kept = relaxed.solve({movable(problem)[0]: Decision.KEEP}, LIMITS)
    assert (kept.bound_s, kept.shares) == (math.inf, None)
    assert relaxed.solve({}, LIMITS).bound_s < math.inf


NETWORKS = (("seq2seq", "pcie3"), ("seq2seq", "nvlink2"), ("unet3d-192", "pcie4"), ("gpt2-medium", "pcie5"))


@pytest.mark.parametrize("seed", seeds(4, 100))
def test_no_plan_of_a_network_is_below_the_bound_of_its_decisions(seed: int) -> None:
    network, link = NETWORKS[seed % len(NETWORKS)]
    problem = Problem.of(instance(network, link))
    assert_no_bound_is_above(problem, plan_of(problem, seed))


PROVEN = {
    "replays ahead of their use take room": ("gpt2-medium", "pcie5", 0.1, 0.160),
    "leaves share no run": ("seq2seq", "pcie3", 0.1, 0.120),
    "a shared op is its owner's": ("resnet50-b256", "pcie4", 0.1, 0.175),
}


@pytest.mark.parametrize(("network", "link", "kept", "overhead"), PROVEN.values(), ids=PROVEN)
def test_the_relaxation_proves_as_much_as_it_did(network: str, link: str, kept: float, overhead: float) -> None:
    profile = instance(network, link)
    problem = Problem.of(profile)
    proven_s = lower_bound(problem, budget_of(profile, kept), "highs", LIMITS)
    assert proven_s > problem.step_s * (1 + overhead)


def test_highs_is_asked_for_no_ray_that_it_has_not_for_it_would_run_with_the_interpreter_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = LinearModel()
    columns = [linear.column(1.0, cost=1.0) for _ in range(3)]
    linear.row([(column, 1.0) for column in columns], low=4.0)
    warm, real, had = Warm(linear.arrays()), highspy.Highs.getDualRay, []

    def asked(highs: Any) -> Any:
        had.append(highs.getDualRayExist()[1])
        return real(highs)

    monkeypatch.setattr(highspy.Highs, "getDualRay", asked, raising=False)
    assert warm.solve(LIMITS)[0]
    assert not warm.highs.getDualRayExist()[1]
    ray = warm.ray()
    assert had == [True]
    assert ray is not None
    linear.cost = [0.0] * 3
    assert max(proven_bound(linear.arrays(), ray), proven_bound(linear.arrays(), -ray)) > 0
    warm.highs.changeColBounds(0, 0.0, 3.0)
    is_infeasible, values, _ = warm.solve(LIMITS)
    assert not is_infeasible
    assert values is not None
    assert values.sum() == pytest.approx(4.0)
    assert warm.highs.getInfo().objective_function_value == pytest.approx(4.0)  # the cost is back
