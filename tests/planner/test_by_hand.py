"""A plan that somebody has changed is scheduled and simulated anew, and an impossible change is refused."""

from __future__ import annotations

import pytest

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.writing import with_decisions
from poochplan.report.tables import simulate_plan
from tests.planner.plans import budget_at
from tests.planner.random_profiles import resnet_like, with_facts


@pytest.fixture(scope="module")
def profile() -> Profile:
    return resnet_like()


@pytest.fixture(scope="module")
def made(profile: Profile) -> Plan:
    return plan(profile, budget_at(profile, 0.5), evaluations=50)


def first(made: Plan, *decisions: Decision) -> str:
    return next(value.name for value in made.values if value.decision in decisions and not value.why)


def test_a_value_that_is_kept_after_all_takes_memory_and_no_copy(profile: Profile, made: Plan) -> None:
    away = [value.name for value in made.values if value.decision is not Decision.KEEP]
    changed = with_decisions(profile, made, dict.fromkeys(away, "keep"))
    assert {value.decision for value in changed.values} == {Decision.KEEP}
    assert changed.prediction.peak_bytes == profile.in_core_peak_bytes > changed.budget_bytes
    assert changed.prediction.out_bytes == 0
    assert (changed.solve.policy, changed.budget_bytes) == ("by hand", made.budget_bytes)


def test_what_the_changed_plan_predicts_is_what_the_simulator_says(profile: Profile, made: Plan) -> None:
    name = first(made, Decision.KEEP, Decision.RECOMPUTE)
    changed = with_decisions(profile, made, {name: Decision.SWAP})
    found = simulate_plan(profile, changed)
    assert (changed.prediction.peak_bytes, changed.prediction.step_s) == (found.peak_bytes, found.step_s)
    before = {value.name: value.decision for value in made.values}
    for value in changed.values:
        assert value.name == name or value.decision in (before[value.name], Decision.KEEP)


def test_no_change_keeps_the_decisions_and_the_share_of_the_link(profile: Profile, made: Plan) -> None:
    one_of_four = plan(profile, budget_at(profile, 0.5), evaluations=50, ranks_per_host=4)
    for one in (made, one_of_four):
        same = with_decisions(profile, one, {})
        assert [value.decision for value in same.values] == [value.decision for value in one.values]
        assert same.link == one.link


def test_what_cannot_be_is_refused_and_why(profile: Profile, made: Plan) -> None:
    with pytest.raises(UsageError, match="expected names of the plan's values, found 'nobody'"):
        with_decisions(profile, made, {"nobody": "keep"})
    with pytest.raises(UsageError, match='expected "keep", "swap" or "recompute", found \'drop\''):
        with_decisions(profile, made, {made.values[0].name: "drop"})
    place = [value.name for value in profile.values].index(first(made, Decision.SWAP, Decision.RECOMPUTE))
    opaque = with_facts(profile, "values", place, unreplayable="it is random")
    pinned = with_facts(opaque, "values", place, pinned="it is a view")
    with pytest.raises(UsageError, match="cannot be decided 'swap': it is a view"):
        with_decisions(pinned, made, {profile.values[place].name: "swap"})
    with pytest.raises(UsageError, match="cannot be decided 'recompute': it is random"):
        with_decisions(opaque, made, {profile.values[place].name: "recompute"})
    other = resnet_like(blocks=3)
    with pytest.raises(UsageError, match="expected the one that the plan was made from"):
        with_decisions(other, made, {})
