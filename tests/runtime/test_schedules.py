"""Schedules that only local search thinks of run with the gradients of in-core training, at the bytes simulated.

Replays before the use of their value, releases after a replay that starts from it, copies out later than the save.
"""

from __future__ import annotations

import msgspec
import pytest

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Link, LinkDirection, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.polish import polish
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import Schedule, assemble, lists_of
from poochplan.planner.simulator.simulate import simulate, try_decisions
from tests.depth import seeds
from tests.planner.plans import plan_with, random_decisions, random_tuning
from tests.runtime.nets import CASES, Case, followed, metered_peaks

SLOW = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=5e7)
SHARE = 0.3
KEEP, SWAP, RECOMPUTE = Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE


def tight(case: Case) -> tuple[Profile, Problem, int]:
    """The case's profile with a link that is waited for, and a budget near the smallest."""
    profile = msgspec.structs.replace(case.profile(), link=Link(name="slow", outward=SLOW, inward=SLOW))
    smallest = smallest_budget(profile)
    return profile, build_problem(profile), int(smallest + SHARE * (profile.in_core_peak_bytes - smallest))


def run_and_compare(case: Case, profile: Profile, problem: Problem, schedule: Schedule) -> None:
    report = followed(case, plan_with(profile, schedule))
    assert report.last_step.peak_bytes == simulate(problem, schedule).peak_bytes


def kinds_of(problem: Problem, schedule: Schedule) -> set[str]:
    """What a schedule does that the plain styles do not."""
    found = set()
    for point, actions in lists_of(problem, schedule).items():
        if any(point > problem.save_points[value] for value in actions["swap_out"]):
            found.add("late copy out")
        if any(point < problem.first_use_point[value] for value in actions["replay"]):
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


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_leaves_after_a_replay_gives_the_gradients_of_in_core_training(name: str) -> None:
    case = CASES[name]
    profile, problem, _ = tight(case)
    schedule = leaving_after_a_replay(problem)
    assert schedule is not None
    run_and_compare(case, profile, problem, schedule)


def test_a_plan_that_switches_recording_between_in_place_chains_replays() -> None:
    measured = CASES["recurrent"].profile()
    # Ops of one length, and a thread that takes nothing: what is recomputed must not depend on how busy the machine is.
    ops = tuple(msgspec.structs.replace(op, duration_s=1e-6) for op in measured.ops)
    link = Link(name="slow", outward=SLOW, inward=SLOW)
    profile = msgspec.structs.replace(measured, ops=ops, link=link, runtime=None)
    # Where an arena has to fit too, nothing is recomputed: the bytes alone are what is asked for.
    plan = poochplan.plan(profile, "90%", evaluations=1000, arena="off")
    assert {actions.record for actions in plan.schedule} >= {"on", "off"}
    assert followed(CASES["recurrent"], plan).total.replayed_values > 0


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_takes_the_bytes_predicted_for_it_but_for_the_loss_of_a_step_before(name: str) -> None:
    case = CASES[name]
    profile = case.profile()
    plan = poochplan.plan(profile, profile.in_core_peak_bytes)
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
