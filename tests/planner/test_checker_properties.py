"""Random profiles and budgets: every plan is one that the independent checker can carry out within the budget."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import AS_STYLED, Style
from poochplan.planner.simulator.simulate import simulate
from tests.depth import tries
from tests.planner.checker import Violation, check
from tests.planner.plans import assert_judged, budget_at, random_decisions, random_tuning
from tests.planner.random_profiles import QUICK, profiles, profiles_with_thread, transformer_like
from tests.planner.test_gathered import gathered, whole
from tests.planner.time_checker import check_times

STYLES = [Style(), Style(in_order=False), Style(release="early"), Style(release="early", prefetch="on_demand")]


@settings(QUICK, max_examples=tries(20, 500))
@given(profile=profiles_with_thread(), share=st.floats(0.0, 1.0))
def test_a_plan_for_any_feasible_budget_fits_it_and_finds_every_input(profile: Profile, share: float) -> None:
    budget = budget_at(profile, share)
    found = plan(profile, budget, evaluations=100)
    verdict = check_times(profile, found, found.prediction)
    assert max(verdict.peak_bytes, verdict.first_step_peak_bytes) <= budget
    assert verdict.peak_bytes == found.prediction.peak_bytes
    assert verdict.first_step_peak_bytes == found.prediction.first_step_peak_bytes
    assert (verdict.out_bytes, verdict.in_bytes) == (found.prediction.out_bytes, found.prediction.in_bytes)
    assert verdict.host_slab_bytes <= found.prediction.host_bytes


@settings(QUICK, max_examples=tries(100, 2000))
@given(
    profile=st.one_of(profiles(30), profiles_with_thread(30), st.just(gathered(whole()))),
    seed=st.integers(0, 2**32),
    style=st.sampled_from(STYLES),
    is_tuned=st.booleans(),
    share=st.floats(0.4, 1.0),
)
def test_any_decisions_can_be_scheduled_and_their_simulated_bytes_are_exact(
    profile: Profile, seed: int, style: Style, is_tuned: bool, share: float
) -> None:
    """In any style, and as any tuning has them carried out; replays find the weights that FSDP2 gathers."""
    problem = build_problem(profile)
    tuning = random_tuning(problem, seed) if is_tuned else AS_STYLED
    schedule = fit(problem, random_decisions(problem, seed), int(share * profile.in_core_peak_bytes), style, tuning)
    simulation = simulate(problem, schedule, trace=True)
    assert_judged(profile, schedule, simulation)
    assert simulation.step_s >= problem.step_s


def test_the_checker_sees_a_missing_replay_input_a_missing_record_and_an_early_release() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    found = plan(profile, "50%", evaluations=100)
    decisions = [value.decision for value in found.values]
    assert Decision.RECOMPUTE in decisions
    assert Decision.SWAP in decisions
    for without in ({"replay": ()}, {"record": ""}, {"prefetch": ()}, {"swap_out": ()}):
        broken = tuple(msgspec.structs.replace(action, **without) for action in found.schedule)  # type: ignore[arg-type]
        with pytest.raises(Violation):
            check(profile, msgspec.structs.replace(found, schedule=broken, record_from_start=False))
