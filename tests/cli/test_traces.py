"""``pooch simulate --trace`` and ``pooch run --trace``: traces that Perfetto opens, and that say what the plan says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.errors import OutputExistsError
from poochplan.formats.occupancy import TRACKS
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Memory
from poochplan.planner.simulator.problem import Problem
from poochplan.report.tables import simulate_plan
from poochplan.report.timeline import predicted_trace, write_trace
from tests.cli.conftest import Pooch
from tests.cli.trace_reader import Trace, read_trace
from tests.planner.random_profiles import transformer_like
from tests.runtime.random_plans import random_plan


def moved(plan: poochplan.Plan, decision: Decision) -> Counter[str]:
    return Counter(value.name for value in plan.values if value.decision is decision)


def named(trace: Trace, track: str, what: str = "") -> Counter[str]:
    return Counter(one.of for one in trace.tracks.get(track, []) if not what or one.name == what)


def live(profile: poochplan.Profile) -> poochplan.Profile:
    """As ops show it, and a trace: without what they take and give back inside."""
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) for op in profile.ops)
    return msgspec.structs.replace(profile, ops=ops, memory=Memory.LIVE)


@pytest.fixture(scope="module")
def mixed_plan(tmp_path_factory: pytest.TempPathFactory, profile: poochplan.Profile) -> Path:
    """A plan that swaps and recomputes."""
    drawn = random_plan(profile, 1, (1, 1, 1))
    found = simulate_plan(Problem.of(profile, drawn), drawn)
    prediction = msgspec.structs.replace(
        drawn.prediction,
        in_core_step_s=profile.times.step_s,
        step_s=found.step_s,
        peak_bytes=found.peak_bytes,
        live_peak_bytes=simulate_plan(Problem.of(live(profile), drawn), drawn).peak_bytes,
        first_step_peak_bytes=found.first_step_peak_bytes,
    )
    plan = msgspec.structs.replace(drawn, prediction=prediction, budget_bytes=found.peak_bytes)
    assert moved(plan, Decision.SWAP)
    assert moved(plan, Decision.RECOMPUTE)
    return plan.save(tmp_path_factory.mktemp("traces") / "mixed.plan.json")


def test_the_predicted_trace_has_every_op_every_copy_and_the_predicted_peak(pooch: Pooch, mixed_plan: Path) -> None:
    result = pooch.ok(f"simulate {pooch.profile} {mixed_plan} --trace trace.json")
    assert result.err == ""
    assert "Predicted step of small" in result.out
    assert "Wrote trace.json" in result.out
    profile, plan = poochplan.Profile.load(pooch.profile), poochplan.Plan.load(mixed_plan)
    trace = read_trace(Path("trace.json"))
    assert trace.process == "small: one predicted step"
    assert set(trace.tracks) <= set(TRACKS)
    ops = Counter(op.name for op in profile.ops)
    assert ops <= Counter(one.name for one in trace.tracks["compute"])
    assert named(trace, "out-link") == named(trace, "in-link") == moved(plan, Decision.SWAP)
    assert [one.name for one in trace.tracks["step"]] == ["forward", "backward", "optimizer"]
    sizes = [size for _, size in trace.counters["live bytes"]]
    assert max(sizes) == plan.prediction.peak_bytes == trace.other["peak_bytes"]
    assert {size for _, size in trace.counters["budget"]} == {plan.budget_bytes}
    end_us = max(one.end_us for found in trace.tracks.values() for one in found)
    assert end_us == pytest.approx(plan.prediction.step_s * 1e6)


def test_a_predicted_step_ends_with_itself_where_in_core_takes_longer_and_goes_over_no_file(
    profile_path: Path, mixed_plan: Path, tmp_path: Path
) -> None:
    profile, plan = poochplan.Profile.load(profile_path), poochplan.Plan.load(mixed_plan)
    slow = msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, plain_step_s=1.0))
    trace = predicted_trace(slow, plan)
    assert trace.step_s == max(bar.end_s for bar in trace.bars) == pytest.approx(plan.prediction.step_s)
    path = write_trace(trace, tmp_path / "trace.json")
    with pytest.raises(OutputExistsError):
        write_trace(trace, path)


def test_simulate_alone_prints_and_gives_what_the_plan_predicts(pooch: Pooch, tmp_path: Path) -> None:
    data = pooch.json("simulate", pooch.profile, pooch.plan)
    prediction = poochplan.Plan.load(pooch.plan).prediction
    for name in ("peak_bytes", "step_s", "memory", "live_peak_bytes", "arena_bytes", "arena_live_bytes"):
        assert data[name] == getattr(prediction, name)
    assert data["arena_peak_bytes"] == prediction.arena_peak_bytes is not None
    assert sum(layer["overhead_s"] for layer in data["layers"]) > 0
    assert sum(data["peak"]["held_by"].values()) == data["peak_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_profile_is_not_simulated(pooch: Pooch) -> None:
    transformer_like(2).save("p.json")
    error = pooch.refused(f"simulate p.json {pooch.plan} --trace trace.json", code=1)
    assert "the plan was made from another profile" in error
    assert not Path("trace.json").exists()


def test_the_measured_trace_has_the_planned_copies_and_the_metered_peak(pooch: Pooch, mixed_plan: Path) -> None:
    plan = poochplan.Plan.load(mixed_plan)
    run = pooch.json(f"run {pooch.small} --plan {mixed_plan} --steps 2 --timed 1 --trace trace.json")
    assert run["fallbacks"] == 0
    trace = read_trace(Path("trace.json"))
    assert trace.process == "small: one measured step"
    assert set(trace.tracks) == set(TRACKS)
    assert named(trace, "out-link") == named(trace, "in-link") == moved(plan, Decision.SWAP)
    assert named(trace, "launching thread", "queue out-link") == moved(plan, Decision.SWAP)
    replayed = named(trace, "compute", "replay")  # by the one that was asked for; others come back with it
    assert replayed
    assert replayed <= moved(plan, Decision.RECOMPUTE)
    assert [one.name for one in trace.tracks["step"]] == ["forward", "backward", "optimizer"]
    assert any(one.of == "0" and "addmm" in one.name for one in trace.tracks["compute"])
    assert max(size for _, size in trace.counters["live bytes"]) == plan.prediction.live_peak_bytes
    assert trace.other["fallbacks"] == 0
