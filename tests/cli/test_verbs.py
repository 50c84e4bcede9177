"""The three verbs, end to end on a small network: what they print, what they write, what they import."""

from __future__ import annotations

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
from poochplan.workload import shipped_configs
from tests.cli.conftest import Pooch


def test_the_three_steps_of_the_main_job(pooch: Pooch, small: str) -> None:
    def told(command: str, *expected: str) -> Any:
        """The data; tables and the names of files are on stderr, and no warning."""
        result = pooch.ok(command, "--json")
        assert [part for part in expected if not re.search(part, result.err, re.MULTILINE)] == []
        assert not re.search("warning|advice", result.err)
        return result.data

    profile = told(f"profile {small} --iterations 1 --top 2", "Wrote small.profile.json", "The 2 layers that save most")
    assert profile["in_core_peak_bytes"] > 0
    assert len(profile["layers"]) == 2
    files = "Wrote small.plan.json\nWrote plan.png"
    command = "plan small.profile.json --budget 85% --timeline plan.png"
    plan = told(command, "predicted overhead", "Values not kept, by layer", files)
    assert plan["peak_bytes"] <= plan["budget_bytes"] < profile["in_core_peak_bytes"]
    names = (
        "in-core peak", "budget", "predicted peak", "measured peak", "in-core step time", "planned step time",
        "predicted overhead", "measured overhead", "bytes swapped", "time recomputed", "stall",
    )  # fmt: skip
    rows = (*(rf"^{name} +\S" for name in names), "^gradients bitwise equal +yes")
    run = told(f"run {small} --plan small.plan.json --check --timeline run.png", *rows, "Wrote run.png")
    assert (run["bitwise_equal"], run["in_core_step_measured"]) == (True, True)
    assert run["measured_peak_bytes"] is not None
    assert all(Path(name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for name in ("plan.png", "run.png"))


def test_the_table_of_layers_fits_in_100_columns_and_says_what_is_missing(pooch: Pooch, workloads: Path) -> None:
    result = pooch.ok(f"profile {workloads}:nested --iterations 1 --top 20 --json")
    lines = result.err[result.err.index("The ") :].splitlines()
    assert max(map(len, lines)) <= 100
    assert re.search("saved +forward +backward +swap +recompute +swap/rec.$", lines[1])
    assert "n/a" in result.err
    data = result.data
    by_layer = {row["layer"]: row for row in data["layers"]}
    assert next(iter(by_layer)).endswith("expand")
    assert sum(row["saved_bytes"] for row in data["layers"]) >= data["saved_bytes"]
    assert {row["ratio"] is None for row in data["layers"]} == {True, False}


def test_without_check_the_run_says_what_was_not_checked(pooch: Pooch, small: str, plan_path: Path) -> None:
    out = pooch.ok(f"run {small} --plan {plan_path} --steps 1 --timed 1").out
    assert re.search(r"gradients bitwise equal +not checked", out)
    assert ", from the profile" in out


def test_of_several_plans_each_step_follows_the_one_for_its_inputs(pooch: Pooch, small: str, plan_path: Path) -> None:
    pooch.ok(f"profile {small} --set batch_size=96 --iterations 1 -o p.json")
    pooch.ok("plan p.json --budget 90% -o 96.plan.json")
    budgets = {128: poochplan.Plan.load(plan_path).budget_bytes, 96: poochplan.Plan.load("96.plan.json").budget_bytes}
    several = f"run {small} --plan {plan_path} --plan 96.plan.json --steps 2 --timed 1 --check"
    for batch_size, followed in ((128, 128), (100, 128), (96, 96), (64, 96)):
        run = pooch.json(several, f"--set batch_size={batch_size}")
        assert (run["bitwise_equal"], run["fallbacks"]) == (True, 0)
        assert run["measured_peak_bytes"] <= run["budget_bytes"] == budgets[followed]
    error = "expected one plan to draw, found 2; give one --plan, or draw each with pooch plan --timeline"
    assert pooch.refused(several, "--timeline run.png") == f"--timeline: {error}"


def test_a_plan_by_evaluations_says_what_was_asked(pooch: Pooch, profile_path: Path) -> None:
    pooch.ok(f"plan {profile_path} --budget 60% --evaluations 20 --seed 3 -o counted.json")
    solve = poochplan.Plan.load("counted.json").solve
    assert (solve.evaluations, solve.seed) == (20, 3)


def test_a_plan_names_torch_the_package_the_host_and_the_inputs(plan_path: Path) -> None:
    plan = poochplan.Plan.load(plan_path)
    assert plan.versions["torch"] == torch.__version__
    assert plan.versions["poochplan"] == poochplan.__version__
    assert plan.inputs == ("0 float32[128, 64]",)
    assert plan.host is not None
    assert (plan.host.system, plan.host.cores) == (platform.system(), os.cpu_count())
    assert platform.node() not in plan.host.processor


def test_a_profile_may_be_compressed(pooch: Pooch, profile_path: Path) -> None:
    poochplan.Profile.load(profile_path).save("p.profile.json.gz")
    pooch.ok("plan p.profile.json.gz --budget 90% --evaluations 20")
    assert Path("p.plan.json").is_file()


def test_a_plan_within_its_budget_is_success_whatever_its_gap(pooch: Pooch, profile_path: Path) -> None:
    pooch.ok(f"plan {profile_path} --budget 85% --gap 1e-9 --evaluations 2 -o plan.json")
    made = poochplan.Plan.load("plan.json")
    assert made.solve.gap is not None
    assert made.solve.gap > 1e-9
    assert made.prediction.peak_bytes <= made.budget_bytes


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_gap_above_the_one_that_is_asked_for_is_an_error_and_what_was_found_is_written(
    pooch: Pooch, profile_path: Path, verb: str
) -> None:
    asked = "--budget 85% --evaluations 2" if verb == "plan" else "--budgets 85% --policies ilp --time-limit 0.1"
    command = f"{verb} {profile_path} {asked} -o plan.json"
    result = pooch(command, "--gap 1e-9 --max-gap 0% --json")
    assert result.code == 4
    assert "--max-gap: expected steps within 0.00% of their proven bounds" in result.err
    assert "written to plan.json" in result.err
    assert Path("plan.json").is_file()
    assert result.data
    pooch.ok(command, "--force --max-gap 900%")


def test_the_version(pooch: Pooch) -> None:
    assert pooch.ok("--version").out == f"pooch {poochplan.__version__}\n"


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_help_has_examples(pooch: Pooch, verb: str) -> None:
    assert f"examples:\n  pooch {verb or 'profile'} " in pooch.ok(verb, "--help").out


def test_the_help_names_every_policy_and_every_network_that_comes_with_it(pooch: Pooch) -> None:
    words = " ".join(pooch("plan --help").out.split()).replace("- ", "-")
    assert [name for name in all_policies() if name not in words] == []
    words = pooch("--help").out
    assert [name for name in shipped_configs() if name not in words] == []
