"""Whatever a plan decides, and however it is scheduled: gradients are bitwise those of in-core training, at the bytes
simulated.
"""

from __future__ import annotations

import functools

import msgspec
import pytest

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Link, LinkDirection, Profile
from poochplan.planner.planning import plan
from poochplan.planner.policies import policy_names
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.polish import polish
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, assemble, points_of
from poochplan.planner.simulator.simulate import simulate, try_decisions
from tests.depth import seeds
from tests.planner.plans import budget_at, plan_with, random_decisions, random_tuning
from tests.runtime.nets import CASES, Case, Recurrent, followed, metered_peaks, of
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler

MIXED, KEPT, SWAPPED, REPLAYED, MOST = (1, 2, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [MIXED, SWAPPED, REPLAYED, MOST], ids=["mixed", "swap", "replay", "most"])
def test_any_decisions_give_the_gradients_of_in_core_training(name: str, weights: tuple[float, float, float]) -> None:
    for seed in seeds(deep=20):
        assert followed(CASES[name], random_plan(CASES[name].profile(), seed, weights), 3).total.steps == 3


def test_decisions_are_carried_out() -> None:
    case = CASES["residual"]
    swapped, replayed = (followed(case, random_plan(case.profile(), 0, one)).last_step for one in (SWAPPED, REPLAYED))
    assert swapped.out_bytes == swapped.in_bytes > 0
    assert swapped.replayed_values == 0
    assert replayed.replayed_values > 5
    assert replayed.out_bytes == 0


@needs_compiler
def test_the_metered_peak_is_the_profiles_in_core_peak_when_all_is_kept_and_falls_when_all_is_swapped() -> None:
    case = CASES["residual"]
    profile = case.profile()
    kept, swapped = (metered_peaks(case, random_plan(profile, 0, weights)) for weights in (KEPT, SWAPPED))
    assert kept[1] == profile.in_core_peak_bytes
    assert kept[0] < kept[1]  # the first step has no optimizer state yet
    assert swapped[1] < 0.8 * kept[1]


SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)


@needs_compiler
@pytest.mark.parametrize("case_name", ["residual", "attention"])
@pytest.mark.parametrize("name", policy_names())
def test_a_policys_plan_runs_as_predicted(name: str, case_name: str) -> None:
    made = _tightest(case_name, name)
    found, predicted = followed(CASES[case_name], made).last_step, made.prediction
    assert found.peak_bytes == predicted.peak_bytes
    assert (found.out_bytes, found.in_bytes) == (predicted.out_bytes, predicted.in_bytes)


@functools.cache
def _tightest(case_name: str, name: str) -> Plan:
    """The policy's plan for the smallest of a few budgets that it fits."""
    profile = CASES[case_name].profile()
    for share in SHARES:
        try:
            return plan(profile, int(share * profile.in_core_peak_bytes), policy=name)
        except InfeasibleError:
            continue
    raise AssertionError(f"{name} does not fit the in-core peak")


SLOW = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=5e7)
KEEP, SWAP, RECOMPUTE = Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE


def tight(case: Case) -> tuple[Profile, Problem, int]:
    """The case's profile with a link that is waited for, and a budget near the smallest."""
    profile = msgspec.structs.replace(case.profile(), link=Link(name="slow", outward=SLOW, inward=SLOW))
    return profile, Problem.of(profile), budget_at(profile, 0.3)


def run_and_compare(case: Case, profile: Profile, problem: Problem, schedule: Schedule) -> None:
    report = followed(case, plan_with(profile, schedule))
    assert report.last_step.peak_bytes == simulate(problem, schedule).peak_bytes


def kinds_of(problem: Problem, schedule: Schedule) -> set[str]:
    """What a schedule does that the plain styles do not."""
    found = set()
    if any(point > problem.save_points[value] for value, point in points_of(problem, schedule, "swap_out").items()):
        found.add("late copy out")
    if any(point < problem.first_use_point[value] for value, point in points_of(problem, schedule, "replay").items()):
        found.add("early replay")
    return found


def leaving_after_a_replay(problem: Problem) -> Schedule | None:
    """One value recomputed, and one that it starts from swapped, gone only between that replay and its own use."""
    first_use = problem.first_use_point
    for value, replay in enumerate(problem.replay.replays):
        for source in replay.inputs if replay is not None and first_use[value] >= 0 else ():
            gone = first_use[value] + 1
            if not problem.must_keep[source] and gone < first_use[source]:
                decisions = [KEEP] * problem.value_count
                decisions[value], decisions[source] = RECOMPUTE, SWAP
                lists = {
                    problem.save_points[source]: {"swap_out": [source]},
                    gone: {"release": [source]},
                    first_use[source]: {"prefetch": [source]},
                }
                return assemble(problem, decisions, lists)
    return None


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_any_schedule_gives_the_gradients_of_in_core_training(name: str) -> None:
    case = CASES[name]
    profile, problem, budget = tight(case)
    found: set[str] = set()
    for seed in seeds(day=4):
        schedule = fit(problem, random_decisions(problem, seed), budget, tuning=random_tuning(problem, seed))
        found |= kinds_of(problem, schedule)
        run_and_compare(case, profile, problem, schedule)
    assert found == {"early replay", "late copy out"}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_a_value_that_leaves_after_a_replay_gives_the_gradients_of_in_core_training(name: str) -> None:
    case = CASES[name]
    profile, problem, _ = tight(case)
    schedule = leaving_after_a_replay(problem)
    run_and_compare(case, profile, problem, schedule)


def test_a_plan_that_switches_recording_between_in_place_chains_replays() -> None:
    case = of(Recurrent, 3, 20, 16)  # long enough that it pays to record a part
    measured = case.profile()
    # Ops of one length, and a thread that takes nothing: what is recomputed must not depend on how busy the machine is.
    ops = tuple(msgspec.structs.replace(op, duration_s=1e-6) for op in measured.ops)
    link = Link(name="slow", outward=SLOW, inward=SLOW)
    profile = msgspec.structs.replace(measured, ops=ops, link=link, runtime=None)
    # Where an arena has to fit too, nothing is recomputed: the bytes alone are what is asked for.
    plan = poochplan.plan(profile, "90%", evaluations=1000, arena="off")
    assert {actions.record for actions in plan.schedule} >= {"on", "off"}
    assert followed(case, plan).total.replayed_values > 0


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_first_step_takes_the_bytes_predicted_for_it_but_for_the_loss_of_a_step_before(name: str) -> None:
    case = CASES[name]
    profile = case.profile()
    plan = poochplan.plan(profile, profile.in_core_peak_bytes, evaluations=100)
    assert plan.prediction.first_step_peak_bytes - metered_peaks(case, plan)[0] in (0, profile.rounded_bytes(4))


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_a_polished_schedule_gives_the_gradients_of_in_core_training(name: str) -> None:
    case = CASES[name]
    profile, problem, budget = tight(case)
    for seed in seeds(deep=5):
        start = try_decisions(problem, "test", random_decisions(problem, seed), budget)
        found = polish(problem, start, budget, Allowance(evaluations=400))
        assert found.simulation.step_s <= start.simulation.step_s or found.peak_bytes < start.peak_bytes
        run_and_compare(case, profile, problem, found.schedule)
