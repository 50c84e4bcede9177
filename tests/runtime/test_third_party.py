"""Unmodified third-party networks under random feasible plans: bitwise, nothing left undone, the bytes simulated."""

from __future__ import annotations

import pytest

from poochplan.formats.plan import Decision
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import simulate
from tests.depth import seeds
from tests.planner.plans import plan_with
from tests.runtime.nets import Case, followed
from tests.runtime.third_party_networks import NETWORKS, QUICK, random_schedule


def follow_random_plans(case: Case, plans: range) -> set[Decision]:
    """Trains under a random plan of each seed; the decisions that the plans made."""
    profile = case.profile()
    problem = Problem.of(profile)
    made: set[Decision] = set()
    for seed in plans:
        schedule = random_schedule(profile, problem, seed)
        made.update(schedule.decisions)
        report = followed(case, plan_with(profile, schedule))
        assert report.last_step.peak_bytes == simulate(problem, schedule).peak_bytes
        assert report.total.replayed_values > 0
        assert report.total.in_bytes > 0 or Decision.SWAP not in schedule.decisions
    return made


def test_there_are_at_least_thirty_four_of_them() -> None:
    assert len(NETWORKS) >= 34


@pytest.mark.parametrize("name", QUICK)
def test_a_network_trains_bitwise_at_the_bytes_simulated(name: str) -> None:
    assert Decision.RECOMPUTE in follow_random_plans(NETWORKS[name], seeds(deep=5))


@pytest.mark.deep
@pytest.mark.cpu_device  # benchmarks/third_party.py takes all of them to the adversarial one
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in QUICK])
def test_every_other_network_trains_bitwise_at_the_bytes_simulated(name: str) -> None:
    assert Decision.RECOMPUTE in follow_random_plans(NETWORKS[name], seeds(deep=2))
