"""Random profiles and budgets: every plan is one that the independent checker can carry out within the budget."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poochplan.planner.planning import plan, smallest_budget
from poochplan.profiler.schema import Profile

from .checker import check
from .random_profiles import profiles


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(profile=profiles(), share=st.floats(0.0, 1.0))
def test_a_plan_for_any_feasible_budget_stays_within_it_and_finds_every_input(profile: Profile, share: float) -> None:
    smallest = smallest_budget(profile)
    budget = int(smallest + share * (profile.in_core_peak_bytes - smallest))
    found = plan(profile, budget)
    verdict = check(profile, found)
    assert verdict.peak_bytes <= budget
    assert verdict.peak_bytes == found.prediction.peak_bytes
    assert verdict.first_step_peak_bytes == found.prediction.first_step_peak_bytes
    assert (verdict.out_bytes, verdict.in_bytes) == (found.prediction.out_bytes, found.prediction.in_bytes)
