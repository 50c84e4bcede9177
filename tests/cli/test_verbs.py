"""The three verbs, end to end on a small network: what they print, what they write, what they import."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.cli import VERBS
from poochplan.planner.sweep import all_policies

Pooch = Any


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_three_steps_of_the_main_job(pooch: Pooch, workloads: Path, tmp_path: Path) -> None:
    target = f"{workloads}:small"
    result = pooch("profile", target, "--iterations", "1", "--top", "3")
    assert (result.code, result.err) == (0, "")
    assert "Wrote small.profile.json" in result.out
    assert "The 3 layers that save most" in result.out
    result = pooch("plan", "small.profile.json", "--budget", "85%", "--timeline", "plan.png")
    assert (result.code, result.err) == (0, "")
    assert "predicted overhead" in result.out
    assert "Values not kept, by layer" in result.out
    assert "Wrote small.plan.json\nWrote plan.png" in result.out
    result = pooch("run", target, "--plan", "small.plan.json", "--check", "--timeline", "run.png")
    assert (result.code, result.err) == (0, "")
    for name in (
        "in-core peak", "budget", "predicted peak", "measured peak", "in-core step time", "planned step time",
        "predicted overhead", "measured overhead", "bytes swapped", "time recomputed", "stall",
    ):  # fmt: skip
        assert re.search(rf"^{name} +\S", result.out, re.MULTILINE), name
    assert re.search(r"^gradients bitwise equal +yes", result.out, re.MULTILINE)
    assert "Wrote run.png" in result.out
    assert png_size(tmp_path / "plan.png") == png_size(tmp_path / "run.png") == (1600, 896)


def test_json_is_alone_on_stdout(pooch: Pooch, workloads: Path) -> None:
    target = f"{workloads}:noisy"
    result = pooch("profile", target, "--iterations", "1", "--top", "2", "--json")
    profile = json.loads(result.out)
    assert "a workload that prints" in result.err
    assert "Wrote noisy.profile.json" in result.err
    assert profile["in_core_peak_bytes"] > 0
    assert len(profile["layers"]) == 2
    plan = json.loads(pooch("plan", "noisy.profile.json", "--budget", "85%", "--json").out)
    assert plan["peak_bytes"] <= plan["budget_bytes"] < profile["in_core_peak_bytes"]
    result = pooch("run", target, "--plan", "noisy.plan.json", "--steps", "2", "--check", "--json")
    run = json.loads(result.out)
    assert run["bitwise_equal"] is True
    assert run["measured_peak_bytes"] is not None
    assert run["in_core_step_measured"] is True


def test_the_table_of_layers_fits_in_100_columns_and_says_what_is_missing(pooch: Pooch, workloads: Path) -> None:
    target = f"{workloads}:nested"
    result = pooch("profile", target, "--iterations", "1", "--top", "20")
    lines = result.out[result.out.index("The ") :].splitlines()
    assert max(map(len, lines)) <= 100
    assert re.search("saved +forward +backward +swap +recompute +swap/rec.$", lines[1])
    assert "n/a" in result.out
    data = json.loads(pooch("profile", target, "--iterations", "1", "--top", "20", "--json", "--force").out)
    by_layer = {row["layer"]: row for row in data["layers"]}
    assert next(iter(by_layer)).endswith("expand")
    assert sum(row["saved_bytes"] for row in data["layers"]) >= data["saved_bytes"]
    assert {row["ratio"] is None for row in data["layers"]} == {True, False}


def test_without_check_the_run_says_what_was_not_checked(pooch: Pooch, workloads: Path, plan_path: Path) -> None:
    result = pooch("run", f"{workloads}:small", "--plan", plan_path, "--steps", "1", "--timed", "1")
    assert result.code == 0
    assert re.search(r"gradients bitwise equal +not checked", result.out)
    assert ", from the profile" in result.out


def test_of_several_plans_each_step_follows_the_one_for_its_inputs(
    pooch: Pooch, workloads: Path, plan_path: Path
) -> None:
    target = f"{workloads}:small"
    smaller = ("--set", "batch_size=96")
    assert pooch("profile", target, *smaller, "--iterations", "1", "-o", "p.json").code == 0
    assert pooch("plan", "p.json", "--budget", "90%", "-o", "96.plan.json").code == 0
    budgets = {128: poochplan.Plan.load(plan_path).budget_bytes, 96: poochplan.Plan.load("96.plan.json").budget_bytes}
    several = ("--plan", plan_path, "--plan", "96.plan.json", "--steps", "2", "--timed", "1", "--check", "--json")
    for batch_size, followed in ((128, 128), (100, 128), (96, 96), (64, 96)):
        run = json.loads(pooch("run", target, *several, "--set", f"batch_size={batch_size}").out)
        assert (run["bitwise_equal"], run["fallbacks"]) == (True, 0)
        assert run["measured_peak_bytes"] <= run["budget_bytes"] == budgets[followed]
    result = pooch("run", target, *several, "--timeline", "run.png")
    assert result.code == 2
    assert result.error == (
        "--timeline: expected one plan to draw, found 2; give one --plan, or draw each with pooch plan --timeline"
    )


def test_a_plan_by_evaluations_has_one_thread_and_says_what_was_asked(pooch: Pooch, profile_path: Path) -> None:
    counted = ("plan", profile_path, "--budget", "60%", "--evaluations", "20", "--seed", "3")
    assert pooch(*counted, "-o", "counted.json").code == 0
    solve = poochplan.Plan.load("counted.json").solve
    assert (solve.evaluations, solve.seed) == (20, 3)
    result = pooch(*counted, "--threads", "2", "-o", "two.json")
    assert (result.code, Path("two.json").exists()) == (2, False)
    assert "threads: expected 1 with evaluations, found 2" in result.error


def test_a_plan_names_torch_the_package_the_host_and_the_inputs(plan_path: Path) -> None:
    plan = poochplan.Plan.load(plan_path)
    assert plan.versions["torch"] == torch.__version__
    assert plan.versions["poochplan"] == poochplan.__version__
    assert plan.inputs == ("0 float32[128, 64]",)
    assert plan.host is not None
    assert (plan.host.system, plan.host.cores) == (platform.system(), os.cpu_count())
    assert platform.node() not in plan.host.processor


def test_a_profile_may_be_compressed(pooch: Pooch, workloads: Path) -> None:
    assert pooch("profile", f"{workloads}:small", "--iterations", "1", "-o", "p.profile.json.gz").code == 0
    assert pooch("plan", "p.profile.json.gz", "--budget", "90%").code == 0
    assert Path("p.plan.json").is_file()


TIGHT_AND_SHORT = ("--budget", "85%", "--gap", "1e-9", "--evaluations", "2", "-o", "plan.json", "--force")


def test_a_plan_within_its_budget_is_success_whatever_its_gap(pooch: Pooch, profile_path: Path) -> None:
    assert pooch("plan", profile_path, *TIGHT_AND_SHORT).code == 0
    made = poochplan.Plan.load("plan.json")
    assert made.solve.gap is not None
    assert made.solve.gap > 1e-9
    assert made.prediction.peak_bytes <= made.budget_bytes


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_gap_above_the_one_that_is_asked_for_is_an_error_and_what_was_found_is_written(
    pooch: Pooch, profile_path: Path, verb: str
) -> None:
    arguments = ["--budget", "85%", "--evaluations", "2", "-o", "plan.json"]
    if verb == "sweep":
        arguments = ["--budgets", "85%", "--policies", "ilp", "--time-limit", "0.1", "-o", "plan.json"]
    result = pooch(verb, profile_path, *arguments, "--gap", "1e-9", "--max-gap", "0%", "--json")
    assert result.code == 4
    assert "--max-gap: expected steps within 0.00% of their proven bounds" in result.err
    assert "written to plan.json" in result.err
    assert Path("plan.json").is_file()
    assert json.loads(result.out)
    assert pooch(verb, profile_path, *arguments, "--force", "--max-gap", "900%").code == 0


def test_a_gap_that_is_asked_for_is_a_share(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "85%", "--max-gap", "wide")
    assert (result.code, "--max-gap: expected a share such as 30% or 0.3, found 'wide'" in result.error) == (2, True)


def test_the_version(pooch: Pooch) -> None:
    result = pooch("--version")
    assert (result.code, result.out) == (0, f"pooch {poochplan.__version__}\n")


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS)], ids=lambda verb: " ".join(verb) or "pooch")
def test_every_help_has_examples(pooch: Pooch, verb: list[str]) -> None:
    result = pooch(*verb, "--help")
    assert result.code == 0
    assert f"examples:\n  pooch {verb[0] if verb else 'profile'} " in result.out


def test_the_help_of_plan_names_every_policy(pooch: Pooch) -> None:
    words = " ".join(pooch("plan", "--help").out.split()).replace("- ", "-")
    assert [name for name in all_policies() if name not in words] == []


def test_the_help_names_every_network_that_comes_with_it(pooch: Pooch) -> None:
    words = pooch("--help").out
    configs = Path(__file__).parents[2] / "configs"
    assert [path.stem for path in configs.glob("*.toml") if path.stem not in words] == []
