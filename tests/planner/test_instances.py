"""The planning problems under ``benchmarks/instances`` are profiles that can be planned, and stay small."""

from __future__ import annotations

from pathlib import Path

import pytest

import poochplan
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.simulator.problem import check_profile

FOLDER = Path(__file__).parents[2] / "benchmarks" / "instances"
FILES = sorted(FOLDER.glob("*.json.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_instance_is_a_profile_of_its_name(path: Path) -> None:
    profile = Profile.load(path)
    check_profile(profile)
    network, _, device = path.name.removesuffix(".json.gz").rpartition("-")
    assert profile.mode == "fake"
    assert (profile.workload, profile.device.name) == (network, f"{device} (roofline)")
    assert profile.times.step_s == pytest.approx(sum(op.duration_s for op in profile.ops))
    saved = [point for point in profile.points if point.kind is PointKind.SAVE]
    assert len(saved) > 50
    assert path.stat().st_size < 300_000


def test_an_instance_is_planned_at_70_percent_in_seconds() -> None:
    profile = Profile.load(FOLDER / "seq2seq-v100.json.gz")
    plan = poochplan.plan(profile, budget="70%", time_limit_s=5)
    assert plan.prediction.peak_bytes <= 0.7 * profile.in_core_peak_bytes
    assert plan.prediction.overhead < 0.1
    assert plan.estimate


def test_there_are_instances_of_every_network() -> None:
    assert len(FILES) == 24
