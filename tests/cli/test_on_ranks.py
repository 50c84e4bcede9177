"""The command line on several ranks: a profile of all, one plan, and a run that reports each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.formats.profile import Profile
from poochplan.formats.run_record import RunRecord
from poochplan.planner.planning import plan
from tests.cli.conftest import Pooch
from tests.torchrun import FORKED, run, started, torchrun

WORKLOADS = """
import os

import torch
from torch.distributed.fsdp import fully_shard

import poochplan


def sharded() -> poochplan.Workload:
    layers = [(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
    model = torch.nn.Sequential(*(fully_shard(torch.nn.Sequential(*block)) for block in layers))
    fully_shard(model)
    images = torch.randn(256, 64)
    return poochplan.Workload(model, lambda: model(images).square().mean(), torch.optim.AdamW(model.parameters()))


def batches(uneven: bool = False) -> poochplan.Workload:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.LayerNorm(64))
    batch_size = 96 if uneven and os.environ.get("RANK") == "1" else 128
    images = torch.randn(batch_size, 64)
    return poochplan.Workload(model, lambda: model(images).square().mean(), torch.optim.AdamW(model.parameters()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload, its profile on two ranks as ``p.json``, and a plan for each of them as ``plan.json``."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "w.py").write_text(WORKLOADS)
    options = ["--nproc", "2", "--iterations", "1", "--throttle", "200MB/s", "-o", "p.json", "--json"]
    done = run([sys.executable, "-m", "poochplan", "profile", "w.py:batches", *options], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["profile"] == "p.json", "rank 0 alone prints"
    assert done.stderr.count("Wrote p.json") == 1
    plan(Profile.load(folder / "p.json"), "85%", ranks_per_host=2, evaluations=1000).save(folder / "plan.json")
    return folder


def test_a_profile_of_two_ranks_has_their_link_and_the_step_of_the_wrapped_model(folder: Path) -> None:
    profile = Profile.load(folder / "p.json")
    assert profile.link.ranks == 2
    parameter_bytes = profile.static_bytes["parameter"]
    assert any(value.born < 0 and 0.9 * parameter_bytes < value.size_bytes <= parameter_bytes
               for value in profile.values if value.kind == "input"), "gradient buckets"  # fmt: skip
    assert poochplan.Plan.load(folder / "plan.json").link == profile.link, "it is not divided again"
    assert [op for op in profile.ops if "broadcast" in op.name] == [], "ranks' orders are no part of a step"
    assert any("allreduce" in op.name for op in profile.ops)


def test_a_workload_that_shards_is_profiled_planned_and_run_on_its_ranks(folder: Path) -> None:
    options = ["--nproc", "2", "--iterations", "1", "--throttle", "200MB/s", "-o", "sharded.json"]
    done = started("tests.cli.forked", "profile", "w.py:sharded", *options, cwd=folder, launcher=FORKED)
    assert done.returncode == 0, done.stderr
    profile = Profile.load(folder / "sharded.json")
    assert any(value.stretch_of >= 0 for value in profile.values), "gathered weights"
    plan(profile, "85%", ranks_per_host=2, evaluations=1000).save(folder / "sharded.plan.json")
    options = ["--plan", "sharded.plan.json", "--check", "--steps", "2", "--timed", "1", "-o", "sharded.run.json"]
    done = started("tests.cli.forked", "run", "w.py:sharded", *options, cwd=folder, launcher=FORKED)
    record = RunRecord.load(folder / "sharded.run.json")
    assert [(rank.bitwise_equal, rank.left_steps) for rank in record.ranks] == [(True, 0), (True, 0)], done.stderr


def test_a_run_reports_each_rank_and_the_worst_and_compares_bits_on_each(folder: Path) -> None:
    options = "--plan", "plan.json", "--check", "--steps", "2", "--timed", "2", "-o", "run.json", "--json"
    done = started("poochplan", "run", "w.py:batches", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    data, record = json.loads(done.stdout), RunRecord.load(folder / "run.json")
    assert data["rank"] == record.rank
    assert len(record.ranks) == 2
    assert [rank.bitwise_equal for rank in record.ranks] == [True, True]
    assert [rank.left_steps for rank in record.ranks] == [0, 0]
    peaks = [rank.measured_peak_bytes for rank in record.ranks]
    assert record.measured_peak_bytes == max(peak for peak in peaks if peak is not None) <= record.budget_bytes
    assert record.out_bytes + record.replayed_values > 0
    assert done.stderr.count("Wrote run.json") == 1
    assert [done.stderr.count(f"\nrank {number} ") for number in (0, 1, 2)] == [1, 1, 0]
    assert "worst rank" in done.stderr


def test_a_rank_with_other_shapes_leaves_the_plan_and_the_others_follow_it(folder: Path) -> None:
    options = "--plan", "plan.json", "--check", "--steps", "2", "--timed", "1", "--set", "uneven=true"
    done = started("poochplan", "run", "w.py:batches", *options, "-o", "uneven.json", cwd=folder)
    record = RunRecord.load(folder / "uneven.json")
    assert record.rank == 1
    assert [rank.left_steps > 0 for rank in record.ranks] == [False, True]
    assert [rank.bitwise_equal for rank in record.ranks] == [True, True]
    assert done.returncode == 1  # torchrun's own
    errors = [line for line in done.stderr.splitlines() if line.startswith("pooch: error")]
    assert len(errors) == 1
    assert "steps left the plan" in errors[0]


def test_ranks_share_what_they_must_and_reduce_gradients(tmp_path: Path) -> None:
    first, second = torchrun("tests.online.launched", tmp_path)
    for facts in (first, second):
        assert (facts["least"], facts["on_any"], facts["gathered"]) == (5, [True, False], [0, 1])
        assert facts["link"][0] == 2
        assert facts["link"][1] >= 3 * 5  # beside five copies out, five back, and five of both
        assert facts["same"] == ""
        assert facts["differs"].startswith("plan: expected the same one on all ranks, found that they differ")
        assert (facts["calls"], facts["class"], facts["again"]) == (1, "Sequential", True)
    assert first["parameters"] == second["parameters"]
    assert first["together"] == second["together"]
    alone = zip(first["alone"], second["alone"], strict=True)
    expected = [(torch.tensor(left) + torch.tensor(right)) / 2 for left, right in alone]
    assert all(map(torch.equal, expected, map(torch.tensor, first["together"])))
    assert first["alone"] != second["alone"]


def test_an_error_on_the_ranks_is_told_and_gives_its_exit_code(workloads: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "poochplan", "profile", f"{workloads}:no_workload", "--nproc", "2"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "pooch: error: rank 0: " in done.stderr
    assert "expected a poochplan.Workload" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_compiled_run_is_refused_on_several_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pooch: Pooch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    error = pooch.refused(f"run {folder}/w.py:batches --compile --budget 60%")
    assert error == "rank 0: --compile: expected one process, found 2 ranks; run it without torchrun"
