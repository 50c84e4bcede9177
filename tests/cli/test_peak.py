"""Who holds the peak: to the byte, of any plan, and as text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.errors import ModelMismatchError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.peak import REPLAY, WORKSPACE, explain_peak
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import build_problem
from poochplan.report.tables import simulate_plan
from tests.planner.plans import plan_with, random_decisions
from tests.planner.random_profiles import random_profile, resnet_like


def random_plan(profile: Profile, seed: int) -> poochplan.Plan:
    """Whatever its peak is."""
    problem = build_problem(profile)
    return plan_with(profile, fit(problem, random_decisions(problem, seed), profile.in_core_peak_bytes // 2))


@pytest.mark.parametrize("seed", range(40))
def test_the_holders_hold_the_peak_of_any_plan_to_the_byte(seed: int) -> None:
    profile = random_profile(seed)
    plan = random_plan(profile, seed)
    found, simulation = explain_peak(profile, plan), simulate_plan(profile, plan)
    assert (found.size_bytes, found.tick) == (simulation.peak_bytes, simulation.peak_tick)
    assert sum(holder.size_bytes for holder in found.holders) == found.size_bytes
    in_core = explain_peak(profile)
    assert sum(holder.size_bytes for holder in in_core.holders) == in_core.size_bytes == profile.in_core_peak_bytes
    for one in (found, in_core):
        assert sum(one.by_kind().values()) == one.size_bytes
        assert sum(sum(kinds.values()) for kinds in one.by_layer().values()) == one.size_bytes


def test_replays_are_among_the_holders_of_some_plan() -> None:
    pairs = [(random_profile(seed), seed) for seed in range(40)]
    kinds = {holder.kind for made, seed in pairs for holder in explain_peak(made, random_plan(made, seed)).holders}
    assert {REPLAY, "parameter", "activation", "temporary"} <= kinds


def test_what_the_op_itself_takes_holds_too() -> None:
    profile = random_profile(0)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=1 << 30) for op in profile.ops)
    found = explain_peak(msgspec.structs.replace(profile, ops=ops))
    assert (found.holders[0].kind, found.holders[0].size_bytes) == (WORKSPACE, 1 << 30)
    assert found.size_bytes == sum(holder.size_bytes for holder in found.holders)


def test_the_text_begins_with_the_moment_and_names_budget_measured_peak_and_the_largest_value(
    profile_path: Path,
) -> None:
    profile = Profile.load(profile_path)
    plan = poochplan.plan(profile, smallest_budget(profile), evaluations=50)
    found = explain_peak(profile, plan, measured_peak_bytes=123 << 10)
    first, *others = str(found).splitlines()
    assert first.startswith("predicted peak ")
    assert f"of a budget of {poochplan.units.format_bytes(plan.budget_bytes)}, measured 123 KiB: in " in first
    assert f"in {found.phase}, at {found.op}" in first
    assert found.layer == simulate_plan(profile, plan).peak_layer
    assert any(found.holders[0].name in line for line in others)
    assert [holder.size_bytes for holder in found.holders] == sorted(
        (holder.size_bytes for holder in found.holders), reverse=True
    )
    assert "in-core" in explain_peak(profile).lines()[0]


def test_what_a_plan_has_moved_away_by_the_peak_is_not_among_the_holders() -> None:
    profile = resnet_like()
    plan = poochplan.plan(profile, smallest_budget(profile), evaluations=50)
    found = explain_peak(profile, plan)
    away = {value.name for value in plan.values if value.decision is not Decision.KEEP}
    in_core = {holder.name for holder in explain_peak(profile).holders}
    assert found.size_bytes < profile.in_core_peak_bytes
    assert (away & in_core) - {holder.name for holder in found.holders}


def test_a_plan_of_another_profile_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match="another profile"):
        explain_peak(random_profile(1), random_plan(random_profile(2), 0))
