"""A proven lower bound is never above the best plan: toys on which an unsound bound would be.

Each optimum is worked out by hand in ``toys.py`` and found again by exhaustive search.
"""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.search.bound import lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.search.time_constraints import seconds_lost
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import simulate
from tests.depth import tries
from tests.planner.oracle import best_schedule
from tests.planner.random_profiles import link
from tests.planner.random_schedules import interfering_profile, random_schedule
from tests.planner.toys import MB, one_value, out_through_backward, replay_beside_a_copy, two_values_of_one_op

GAP = 0.01
"""Of the step time: a proof as close as this is enough."""


def assert_the_bound_holds(profile: Profile, budget_bytes: int, optimum_s: float) -> None:
    """Not above the optimum, which no plan is below; above the in-core step, which needs no proof."""
    in_core_s = build_problem(profile).step_s
    by_the_lp_alone = plan(profile, budget_bytes, evaluations=tries(1000, 20000))
    beside_the_search = plan(profile, budget_bytes, time_limit_s=tries(5, 60), threads=2, gap=GAP)
    for found in (by_the_lp_alone, beside_the_search):
        assert found.prediction.step_s >= optimum_s * (1 - 1e-9)
        assert found.solve.bound_s is not None
        assert in_core_s * (1 - 1e-9) <= found.solve.bound_s <= optimum_s * (1 + 1e-9)
    for found, small in ((by_the_lp_alone, 1e-6), (beside_the_search, GAP)):  # a small gap ends the proof
        assert found.solve.bound_s > in_core_s or optimum_s <= in_core_s * (1 + small)


def assert_the_optimum_is(profile: Profile, budget_bytes: int, optimum_s: float) -> None:
    best = best_schedule(build_problem(profile), budget_bytes)
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
    lost_s = lower_bound(build_problem(profile), smallest, "highs", SolverLimits(60)) - 5
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
    problem = build_problem(interfering_profile(seed))
    found = simulate(problem, random_schedule(problem, seed))
    peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
    assert lower_bound(problem, peak_bytes, "highs", SolverLimits(60)) <= found.step_s * (1 + 1e-9)
