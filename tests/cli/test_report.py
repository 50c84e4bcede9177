"""Timelines, frames and the holders of the peak say what the profile, the plan and the simulator say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

import poochplan
from poochplan.errors import ModelMismatchError
from poochplan.formats.occupancy import Bar, live_bytes, static_bytes
from poochplan.formats.plan import Decision
from poochplan.formats.profile import LinkDirection, Profile
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, LEAST_COUNTED_BYTES
from poochplan.formats.run_record import fragmentation_text
from poochplan.peak import REPLAY, WORKSPACE, explain_peak
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.report.tables import decision_data, decisions_by_layer, overhead_by_layer, simulate_plan
from poochplan.report.timeline import in_core_curve, predicted_trace, timeline_of
from tests.planner.plans import plan_with, random_decisions
from tests.planner.random_profiles import random_profile, resnet_like
from tests.runtime.random_plans import held, planned, problem_of
from tests.runtime.source_nets import CASTS


@pytest.fixture(scope="module")
def profile(profile_path: Path) -> Profile:
    """A real profile, with a link so slow that copies do not hide."""
    measured = Profile.load(profile_path)
    rate = sum(measured.static_bytes.values()) / measured.times.step_s
    slow = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=rate)
    changes = {"outward": slow, "inward": slow, "duplex": 0.8, "interference_out": 0.1, "interference_in": 0.1}
    link = msgspec.structs.replace(measured.link, **changes)
    return msgspec.structs.replace(measured, link=link)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> poochplan.Plan:
    return poochplan.plan(profile, smallest_budget(profile), evaluations=100)


def test_the_in_core_curve_peaks_where_the_profile_says(profile: Profile) -> None:
    assert live_bytes(profile).max() == profile.in_core_peak_bytes
    assert in_core_curve(profile).peak_bytes == profile.in_core_peak_bytes
    assert in_core_curve(profile).times_s[-1] == pytest.approx(profile.times.plain_step_s)


def test_what_is_always_live_is_the_least_that_is_live(profile: Profile) -> None:
    assert "gradient" not in static_bytes(profile)
    tiny = sum(value.size_bytes < LEAST_COUNTED_BYTES for value in profile.values)  # of which peaks may count nothing
    assert sum(static_bytes(profile).values()) <= live_bytes(profile).min() + tiny * ALLOCATION_UNIT_BYTES


def seconds(bars: list[Bar]) -> float:
    return sum(bar.end_s - bar.start_s for bar in bars)


def test_the_timeline_covers_the_simulated_step(profile: Profile, plan: poochplan.Plan) -> None:
    timeline = timeline_of(profile, plan)
    assert timeline.memory.peak_bytes == plan.prediction.peak_bytes <= plan.budget_bytes
    assert timeline.memory.times_s[-1] == pytest.approx(plan.prediction.step_s)
    assert np.all(np.diff(timeline.memory.times_s) >= -1e-12)
    compute, in_core = ([bar for bar in timeline.bars if bar.row == row] for row in ("compute", "in-core"))
    assert seconds(compute) == pytest.approx(plan.prediction.step_s)
    assert seconds(in_core) == pytest.approx(plan.prediction.in_core_step_s)
    assert [bar.what for bar in in_core] == ["forward", "backward", "optimizer"]
    replay_s, stall_s = (seconds([bar for bar in compute if bar.what == what]) for what in ("replay", "stall"))
    assert stall_s == pytest.approx(plan.prediction.stall_s)
    assert replay_s >= plan.prediction.replay_s * (1 - 1e-9)
    assert stall_s + replay_s > 0


def test_a_plan_of_another_profile_names_the_first_value_that_differs(profile: Profile, plan: poochplan.Plan) -> None:
    values = (msgspec.structs.replace(plan.values[0], name="stem/out"), *plan.values[1:])
    for shown in (Problem.of, explain_peak):
        with pytest.raises(ModelMismatchError, match="another profile: expected the saved value stem/out, found"):
            shown(profile, msgspec.structs.replace(plan, values=values))


def test_decisions_add_up_to_the_saved_bytes(plan: poochplan.Plan) -> None:
    by_layer, totals = decisions_by_layer(plan), decision_data(plan)
    assert sum(one["values"] for one in totals.values()) == len(plan.saved)
    for decision in ("keep", "swap", "recompute"):
        assert by_layer[decision].sum() == totals[decision]["bytes"]
    away = by_layer["swap"] + by_layer["recompute"]
    assert away.is_monotonic_decreasing


def test_the_overhead_by_layer_adds_up_to_the_predicted_overhead(profile: Profile, plan: poochplan.Plan) -> None:
    frame = overhead_by_layer(profile, plan)
    prediction = plan.prediction
    kept_s = Problem.of(profile, plan).in_core_s
    assert frame["overhead_s"].sum() == pytest.approx(prediction.step_s - kept_s, rel=1e-6)
    assert frame["overhead_s"].is_monotonic_decreasing


@pytest.mark.parametrize("decision", Decision)
def test_what_is_shown_of_plans_that_hold_sources_is_what_the_simulator_says(decision: Decision) -> None:
    case = CASTS["autocast"]
    profile = case.profile()
    plan, _ = planned(case, held(problem_of(case), decision))
    assert any(value.source and value.until >= 0 for value in plan.values)
    simulation, explained = simulate_plan(Problem.of(profile, plan), plan), explain_peak(profile, plan)
    assert sum(holder.size_bytes for holder in explained.holders) == simulation.peak_bytes
    assert explained.layer == simulation.peak_layer
    assert explained.tick < explained.tick_count == len(simulation.memory_bytes)
    ops = Problem.of(profile, plan).profile.ops
    last = [bar for bar in timeline_of(profile, plan).bars if bar.row == "compute" and bar.what == "optimizer"]
    assert seconds(last) == pytest.approx(sum(op.duration_s for op in ops if op.phase == "optimizer"))
    trace = predicted_trace(profile, plan)
    assert [bar.what for bar in trace.bars if bar.row == "step"] == ["forward", "backward", "optimizer"]
    run = Counter(bar.what for bar in trace.bars if bar.row == "compute")
    assert {name: run[name] for name in run if name not in ("replay", "stall", "runtime")} == Counter(
        op.name for op in profile.ops
    )
    overhead_s = simulation.step_s - sum(op.duration_s for op in ops)
    assert overhead_by_layer(profile, plan)["overhead_s"].sum() == pytest.approx(overhead_s)


OLDER, NEWER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("reserved_bytes", "variable", "hint"),
    [(1100, "", False), (2000, "", True), (2000, NEWER, False), (2000, OLDER, False)],
)
def test_much_fragmentation_names_the_setting_that_helps_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, reserved_bytes: int, variable: str, hint: bool
) -> None:
    for name in (NEWER, OLDER):  # which torch still reads
        monkeypatch.setenv(name, "expandable_segments:True" if name == variable else "")
    text = fragmentation_text(1000, reserved_bytes)
    assert ("set PYTORCH_ALLOC_CONF=expandable_segments:True" in text) is hint


def random_plan(profile: Profile, seed: int) -> poochplan.Plan:
    """Whatever its peak is."""
    problem = Problem.of(profile)
    return plan_with(profile, fit(problem, random_decisions(problem, seed), profile.in_core_peak_bytes // 2))


def test_the_holders_hold_the_peak_of_any_plan_to_the_byte() -> None:
    kinds = set[str]()
    for seed in range(40):
        profile = random_profile(seed)
        plan = random_plan(profile, seed)
        found, simulation, in_core = (
            explain_peak(profile, plan),
            simulate_plan(Problem.of(profile, plan), plan),
            explain_peak(profile),
        )
        assert (found.size_bytes, found.tick) == (simulation.peak_bytes, simulation.peak_tick)
        assert in_core.size_bytes == profile.in_core_peak_bytes
        for one in (found, in_core):
            assert sum(holder.size_bytes for holder in one.holders) == one.size_bytes
            assert sum(one.by_kind().values()) == one.size_bytes
            assert sum(sum(kinds.values()) for kinds in one.by_layer().values()) == one.size_bytes
        kinds |= {holder.kind for holder in found.holders}
    assert {REPLAY, "parameter", "activation", "temporary"} <= kinds


def test_what_the_op_itself_takes_holds_too() -> None:
    profile = random_profile(0)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=1 << 30) for op in profile.ops)
    found = explain_peak(msgspec.structs.replace(profile, ops=ops))
    assert (found.holders[0].kind, found.holders[0].size_bytes) == (WORKSPACE, 1 << 30)
    assert found.size_bytes == sum(holder.size_bytes for holder in found.holders)


def test_the_text_begins_with_the_moment_and_names_budget_measured_peak_and_the_largest_value(
    profile: Profile, plan: poochplan.Plan
) -> None:
    found = explain_peak(profile, plan, measured_peak_bytes=123 << 10)
    first, *others = str(found).splitlines()
    assert first.startswith("predicted peak ")
    assert f"of a budget of {poochplan.units.format_bytes(plan.budget_bytes)}, measured 123 KiB: in " in first
    assert f"in {found.phase}, at {found.op}" in first
    assert found.layer == simulate_plan(Problem.of(profile, plan), plan).peak_layer
    assert any(found.holders[0].name in line for line in others)
    sizes = [holder.size_bytes for holder in found.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert "in-core" in explain_peak(profile).lines()[0]


def test_what_a_plan_has_moved_away_by_the_peak_is_not_among_the_holders() -> None:
    profile = resnet_like()
    plan = poochplan.plan(profile, smallest_budget(profile), evaluations=50)
    found = explain_peak(profile, plan)
    away = {value.name for value in plan.values if value.decision is not Decision.KEEP}
    in_core = {holder.name for holder in explain_peak(profile).holders}
    assert found.size_bytes < profile.in_core_peak_bytes
    assert (away & in_core) - {holder.name for holder in found.holders}
