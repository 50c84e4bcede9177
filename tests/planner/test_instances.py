"""The planning problems under ``benchmarks/instances``, and the command behind ``make bench``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

import poochplan
from benchmarks import settings, sources
from benchmarks.settings import SETTINGS, SMALL, Setting
from poochplan.formats.plan import Decision
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner import plan, smallest_budget
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


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "sources.json"
EFFORT = argparse.Namespace(time_limit=2.0, gap=0.001, seed=0, threads=2)


def test_the_command_plans_a_setting_and_says_what_made_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["sources", "--settings", "small", "--time-limit", "2", "-o", str(output)])
    assert sources.main() == 0
    found = json.loads(output.read_text())
    assert found["arguments"]["seed"] == 0
    assert found["commit"]
    assert set(found["versions"]) >= {"torch", "highspy"}
    (row,) = found["rows"]
    assert row["smallest_peak_bytes"] <= row["plan"]["peak_bytes"] <= row["budget_bytes"] < row["in_core_peak_bytes"]
    assert 0 < row["plan"]["bound"] <= row["plan"]["overhead"] < 0.5
    shown = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sources", "--table", str(output)])
    assert sources.main() == 0
    assert sources.line(row) in shown
    assert sources.line(row) in capsys.readouterr().out


def test_a_batch_without_a_plan_is_proven_by_its_peak_and_the_largest_is_planned() -> None:
    setting = Setting("none", "ResNet-14", "nothing", memory="0.51GiB", build=settings.small, batch=64)
    row = sources.row_of(setting, EFFORT)
    most = row["largest_batch"]
    assert not row["fits"]
    assert row["smallest_peak_bytes"] > row["budget_bytes"] >= row["plan"]["peak_bytes"]
    assert 0 < row["in_core_batch"] < row["planned_batch"] == most < 64
    assert smallest_budget(sources.step_of(setting, most)) <= row["budget_bytes"]
    assert smallest_budget(sources.step_of(setting, most + 1)) > row["budget_bytes"]
    assert "**no plan**" in sources.line(row)


def test_a_step_without_replays_is_planned_by_swapping_alone_and_never_faster() -> None:
    profile = sources.step_of(SMALL["small"], 64)
    budget_bytes = int(0.6 * profile.in_core_peak_bytes)
    free, alone = (plan(one, budget_bytes, evaluations=2000) for one in (profile, sources.without_replays(profile)))
    assert Decision.RECOMPUTE in {value.decision for value in free.values}
    assert {value.decision for value in alone.values} <= {Decision.KEEP, Decision.SWAP}
    assert alone.prediction.replay_s == 0
    assert alone.prediction.step_s >= free.prediction.step_s


def test_the_page_shows_the_committed_results_of_every_setting() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [row["setting"] for row in rows] == [*SETTINGS]
    page = (ROOT / "benchmarks" / "pages" / "sources.md").read_text(encoding="utf-8")
    assert [row["setting"] for row in rows if sources.line(row) not in page] == []
    assert [row["setting"] for row in rows if sources.waits(row) not in page] == []


def test_no_committed_plan_is_over_its_memory_or_below_its_bound() -> None:
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["plan"] is not None]
    assert len(rows) >= len(SETTINGS) - 2
    assert [row["setting"] for row in rows if row["plan"]["peak_bytes"] > row["budget_bytes"]] == []
    assert [row["setting"] for row in rows if row["plan"]["overhead"] < row["plan"]["bound"] - 1e-9] == []
    overheads = {row["setting"]: row["plan"]["overhead"] for row in rows}
    assert overheads["pooch-pcie3"] <= 0.0895
    assert overheads["pooch-nvlink2"] <= 0.0085
