"""``pooch simulate --trace`` and ``pooch run --trace``: traces that Perfetto opens, and that say what the plan says."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import poochplan
from poochplan.errors import OutputExistsError
from poochplan.formats.occupancy import TRACKS
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Memory
from poochplan.report.tables import simulate_plan
from poochplan.report.timeline import predicted_trace, write_trace
from tests.cli.trace_reader import Trace, read_trace
from tests.runtime.random_plans import random_plan

Pooch = Any


def moved(plan: poochplan.Plan, decision: Decision) -> Counter[str]:
    return Counter(value.name for value in plan.values if value.decision is decision)


def named(trace: Trace, track: str, what: str = "") -> Counter[str]:
    return Counter(one.of for one in trace.tracks.get(track, []) if not what or one.name == what)


def live(profile: poochplan.Profile) -> poochplan.Profile:
    """As ops show it, and a trace: without what they take and give back inside."""
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) for op in profile.ops)
    return msgspec.structs.replace(profile, ops=ops, memory=Memory.LIVE)


@pytest.fixture(scope="module")
def mixed_plan(profile_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that swaps and recomputes."""
    profile = poochplan.Profile.load(profile_path)
    drawn = random_plan(profile, 1, (1, 1, 1))
    found = simulate_plan(profile, drawn)
    prediction = msgspec.structs.replace(
        drawn.prediction,
        in_core_step_s=profile.times.step_s,
        step_s=found.step_s,
        peak_bytes=found.peak_bytes,
        live_peak_bytes=simulate_plan(live(profile), drawn).peak_bytes,
        first_step_peak_bytes=found.first_step_peak_bytes,
    )
    plan = msgspec.structs.replace(drawn, prediction=prediction, budget_bytes=found.peak_bytes)
    assert moved(plan, Decision.SWAP)
    assert moved(plan, Decision.RECOMPUTE)
    return plan.save(tmp_path_factory.mktemp("traces") / "mixed.plan.json")


def test_the_predicted_trace_has_every_op_every_copy_and_the_predicted_peak(
    pooch: Pooch, profile_path: Path, mixed_plan: Path
) -> None:
    result = pooch("simulate", profile_path, mixed_plan, "--trace", "trace.json")
    assert (result.code, result.err) == (0, "")
    assert "Predicted step of small" in result.out
    assert "Wrote trace.json" in result.out
    profile, plan = poochplan.Profile.load(profile_path), poochplan.Plan.load(mixed_plan)
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


def test_a_predicted_step_ends_with_itself_where_in_core_takes_longer(profile_path: Path, mixed_plan: Path) -> None:
    profile, plan = poochplan.Profile.load(profile_path), poochplan.Plan.load(mixed_plan)
    slow = msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, plain_step_s=1.0))
    trace = predicted_trace(slow, plan)
    assert trace.step_s == max(bar.end_s for bar in trace.bars) == pytest.approx(plan.prediction.step_s)


def test_simulate_alone_prints_and_gives_what_the_plan_predicts(
    pooch: Pooch, profile_path: Path, plan_path: Path, tmp_path: Path
) -> None:
    data = json.loads(pooch("simulate", profile_path, plan_path, "--json").out)
    prediction = poochplan.Plan.load(plan_path).prediction
    assert (data["peak_bytes"], data["step_s"]) == (prediction.peak_bytes, prediction.step_s)
    assert sum(layer["overhead_s"] for layer in data["layers"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_profile_is_not_simulated(pooch: Pooch, workloads: Path, plan_path: Path) -> None:
    assert pooch("profile", f"{workloads}:nested", "--iterations", "1", "-o", "p.json").code == 0
    result = pooch("simulate", "p.json", plan_path, "--trace", "trace.json")
    assert (result.code, Path("trace.json").exists()) == (1, False)
    assert "the plan was made from another profile" in result.error


@pytest.mark.parametrize("verb", ["simulate", "run"])
def test_a_trace_goes_into_a_folder_that_is_there_and_over_no_file(
    pooch: Pooch, workloads: Path, profile_path: Path, plan_path: Path, verb: str
) -> None:
    Path("mine.json").write_text("mine")
    arguments = (
        ("simulate", profile_path, plan_path)
        if verb == "simulate"
        else ("run", f"{workloads}:small", "--plan", plan_path)
    )
    assert "the folder nowhere does not exist" in pooch(*arguments, "--trace", "nowhere/t.json").error
    assert "mine.json exists and will not be overwritten" in pooch(*arguments, "--trace", "mine.json").error
    assert "expected a file name that ends in .json" in pooch(*arguments, "--trace", "trace.txt").error
    assert Path("mine.json").read_text() == "mine"
    with pytest.raises(OutputExistsError):
        write_trace(predicted_trace(poochplan.Profile.load(profile_path), poochplan.Plan.load(plan_path)), "mine.json")


def test_the_measured_trace_has_the_planned_copies_and_the_metered_peak(
    pooch: Pooch, workloads: Path, mixed_plan: Path
) -> None:
    plan = poochplan.Plan.load(mixed_plan)
    steps = ("--steps", "2", "--timed", "1")
    result = pooch("run", f"{workloads}:small", "--plan", mixed_plan, *steps, "--trace", "trace.json", "--json")
    assert (result.code, json.loads(result.out)["fallbacks"]) == (0, 0)
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


@pytest.mark.skipif(importlib.util.find_spec("perfetto") is None, reason="the package perfetto is not installed")
def test_perfetto_reads_the_same_from_the_trace(pooch: Pooch, profile_path: Path, mixed_plan: Path) -> None:
    from perfetto.trace_processor import TraceProcessor

    assert pooch("simulate", profile_path, mixed_plan, "--trace", "trace.json").code == 0
    ours = read_trace(Path("trace.json"))
    try:
        processor = TraceProcessor(trace="trace.json")
    except OSError as error:  # its engine is fetched on first use
        pytest.skip(f"perfetto's engine is not there: {error}")
    with processor:
        rows = processor.query(
            "select thread.name as track, count(*) as n from slice join thread_track on "
            "slice.track_id = thread_track.id join thread using(utid) group by 1"
        )
        assert {row.track: row.n for row in rows} == {name: len(found) for name, found in ours.tracks.items()}
        (lost,) = processor.query("select sum(value) as n from stats where severity = 'error'")
        assert not lost.n
