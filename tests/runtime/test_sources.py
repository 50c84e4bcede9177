"""A plan holds a smaller tensor in place of the larger copy that autograd saves of it: gradients stay bitwise those of
in-core training, at the bytes simulated.
"""

from __future__ import annotations

import pytest

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.sources import sources_of, with_sources
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import STYLES, Candidate, try_style
from poochplan.planner.writing import write_plan
from tests.depth import seeds
from tests.planner.plans import random_decisions
from tests.runtime.cast_nets import CASTS
from tests.runtime.nets import followed, metered_peaks

KEEP, SWAP, RECOMPUTE = Decision


def planned(name: str, wish: list[Decision], budget_share: float = 0.0, style: int = 0) -> tuple[Plan, Candidate]:
    profile = with_sources(CASTS[name].profile())
    budget_bytes = int(budget_share * profile.in_core_peak_bytes)
    found = try_style(build_problem(profile), "by hand", wish, budget_bytes, STYLES[style])
    given = PolicyInput.of(profile, 1 << 40)
    return write_plan(given, Optimum(found, "by hand"), 0.0, is_laid_out=False), found


def problem_of(name: str) -> Problem:
    return build_problem(with_sources(CASTS[name].profile()))


def held(problem: Problem, of_sources: Decision, others: Decision = KEEP) -> list[Decision]:
    """Every copy that can be is recomputed, and its source is decided so."""
    wish = [KEEP if reason else others for reason in problem.must_keep]
    for source, copy in problem.copies.items():
        if problem.replay.replays[copy] is not None:
            possible = of_sources is not RECOMPUTE or problem.replay.replays[source] is not None
            wish[copy], wish[source] = RECOMPUTE, of_sources if possible else KEEP
    return wish


@pytest.mark.parametrize("name", CASTS)
def test_the_networks_have_sources(name: str) -> None:
    assert len(sources_of(CASTS[name].profile())) >= 4


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("decision", Decision)
def test_a_source_is_held_swapped_or_replayed_in_place_of_its_copy(name: str, decision: Decision) -> None:
    plan, found = planned(name, held(problem_of(name), decision))
    report = followed(CASTS[name], plan, 3)
    assert report.last_step.replayed_values >= len(problem_of(name).copies)
    assert metered_peaks(CASTS[name], plan)[1] == found.simulation.peak_bytes


@pytest.mark.parametrize("name", CASTS)
def test_any_decisions_about_sources_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(6, 40):
        problem = problem_of(name)
        plan, found = planned(name, random_decisions(problem, seed), (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(CASTS[name], plan, 2)
        assert metered_peaks(CASTS[name], plan) == [
            found.simulation.first_step_peak_bytes,
            found.simulation.peak_bytes,
        ]
