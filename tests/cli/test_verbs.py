"""The verbs, end to end on a small network: what they print, what they write, and what they advise."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import poochplan
from poochplan.cli import VERBS
from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.sweep import all_policies
from poochplan.profiler.request import STAGES, stage_share
from poochplan.workload import shipped_configs
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler


def test_the_three_steps_of_the_main_job(pooch: Pooch) -> None:
    def told(command: str, *expected: str) -> Any:
        """The data; tables and the names of files are on stderr, and no warning."""
        result = pooch.ok(command, "--json")
        assert [part for part in expected if not re.search(part, result.err, re.MULTILINE)] == []
        assert not re.search("warning|advice", result.err)
        return result.data

    profile = told(
        f"profile {pooch.small} --iterations 1 --top 2", "Wrote small.profile.json", "The 2 layers that save most"
    )
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
    run = told(f"run {pooch.small} --plan small.plan.json --check --timeline run.png", *rows, "Wrote run.png")
    assert (run["bitwise_equal"], run["in_core_step_measured"]) == (True, True)
    assert run["measured_peak_bytes"] is not None
    assert all(Path(name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for name in ("plan.png", "run.png"))


def test_the_table_of_layers_fits_in_100_columns_and_says_what_is_missing(pooch: Pooch) -> None:
    result = pooch.ok(f"profile {pooch.workloads}:nested --iterations 1 --top 20 --json")
    lines = result.err[result.err.index("The ") :].splitlines()
    assert max(map(len, lines)) <= 100
    assert re.search("saved +forward +backward +swap +recompute +swap/rec.$", lines[1])
    assert "n/a" in result.err
    data = result.data
    by_layer = {row["layer"]: row for row in data["layers"]}
    assert next(iter(by_layer)).endswith("expand")
    assert sum(row["saved_bytes"] for row in data["layers"]) >= data["saved_bytes"]
    assert {row["ratio"] is None for row in data["layers"]} == {True, False}


def test_without_check_the_run_says_what_was_not_checked(pooch: Pooch) -> None:
    out = pooch.ok(f"run {pooch.small} --plan {pooch.plan} --steps 1 --timed 1").out
    assert re.search(r"gradients bitwise equal +not checked", out)
    assert ", from the profile" in out


def test_of_several_plans_each_step_follows_the_one_for_its_inputs(pooch: Pooch) -> None:
    pooch.ok(f"profile {pooch.small} --set batch_size=96 --iterations 1 -o p.json")
    pooch.ok("plan p.json --budget 90% -o 96.plan.json")
    budgets = {128: poochplan.Plan.load(pooch.plan).budget_bytes, 96: poochplan.Plan.load("96.plan.json").budget_bytes}
    several = f"run {pooch.small} --plan {pooch.plan} --plan 96.plan.json --steps 2 --timed 1 --check"
    for batch_size, followed in ((128, 128), (100, 128), (96, 96), (64, 96)):
        run = pooch.json(several, f"--set batch_size={batch_size}")
        assert (run["bitwise_equal"], run["fallbacks"]) == (True, 0)
        assert run["measured_peak_bytes"] <= run["budget_bytes"] == budgets[followed]
    error = "expected one plan to draw, found 2; give one --plan, or draw each with pooch plan --timeline"
    assert pooch.refused(several, "--timeline run.png") == f"--timeline: {error}"


def test_a_plan_of_a_compressed_profile_says_what_was_asked_and_is_success_whatever_its_gap(pooch: Pooch) -> None:
    Profile.load(pooch.profile).save("p.profile.json.gz")
    pooch.ok("plan p.profile.json.gz --budget 85% --gap 1e-9 --evaluations 2 --seed 3")
    made = poochplan.Plan.load("p.plan.json")
    assert (made.solve.evaluations, made.solve.seed) == (2, 3)
    assert made.solve.gap is not None
    assert made.solve.gap > 1e-9
    assert made.prediction.peak_bytes <= made.budget_bytes


def test_a_plan_names_torch_the_package_the_host_and_the_inputs(plan: poochplan.Plan) -> None:
    assert plan.versions["torch"] == torch.__version__
    assert plan.versions["poochplan"] == poochplan.__version__
    assert plan.inputs == ("0 float32[128, 64]",)
    assert plan.host is not None
    assert (plan.host.system, plan.host.cores) == (platform.system(), os.cpu_count())
    assert platform.node() not in plan.host.processor


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_gap_above_the_one_that_is_asked_for_is_an_error_and_what_was_found_is_written(
    pooch: Pooch, verb: str
) -> None:
    asked = "--budget 85% --evaluations 2" if verb == "plan" else "--budgets 85% --policies ilp --time-limit 0.1"
    command = f"{verb} {pooch.profile} {asked} -o plan.json"
    result = pooch(command, "--gap 1e-9 --max-gap 0% --json")
    assert result.code == 4
    assert "--max-gap: expected steps within 0.00% of their proven bounds" in result.err
    assert "written to plan.json" in result.err
    assert Path("plan.json").is_file()
    assert result.data
    pooch.ok(command, "--force --max-gap 900%")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_help_has_examples(pooch: Pooch, verb: str) -> None:
    assert f"examples:\n  pooch {verb or 'profile'} " in pooch.ok(verb, "--help").out


def test_the_help_names_every_policy_and_every_network_that_comes_with_it_and_there_is_a_version(pooch: Pooch) -> None:
    assert pooch.ok("--version").out == f"pooch {poochplan.__version__}\n"
    words = " ".join(pooch("plan --help").out.split()).replace("- ", "-")
    assert [name for name in all_policies() if name not in words] == []
    words = pooch("--help").out
    assert [name for name in shipped_configs() if name not in words] == []


def test_a_model_in_eval_mode_is_warned_about_noted_and_advised_about(pooch: Pooch) -> None:
    result = pooch.ok(f"profile {pooch.workloads}:resting -o resting.json --iterations 1 --warmup 1 --json")
    assert result.err.count("pooch: warning: ") == 1
    assert "pooch: warning: poochplan: the model was in eval mode: no dropout, no batch statistics" in result.err
    assert "the model was in eval mode: no dropout, no batch statistics" in result.data["notes"]
    assert "advice 1" in pooch("show resting.json").out
    (line,) = poochplan.Profile.load("resting.json").advice()
    result = pooch.ok("plan resting.json --budget 100% --json")
    assert f"advice: {line}" in result.err.splitlines()
    assert "advice" not in result.out


def test_the_budget_is_the_device_memory_less_the_margin(pooch: Pooch, profile: poochplan.Profile) -> None:
    budget_bytes = (smallest_budget(profile) + profile.in_core_peak_bytes) // 2
    memory = f"--device-memory {budget_bytes + (1 << 20)} --margin 1MiB"
    plan = f"plan {pooch.profile} --evaluations 50"
    assert pooch.json(f"{plan} -o plan.json {memory}")["budget_bytes"] == budget_bytes
    pooch.ok(f"{plan} -o all.json --device-memory {512 * 2**20 + budget_bytes}")
    assert poochplan.Plan.load("all.json").budget_bytes == budget_bytes


def test_a_plan_for_another_machine_says_so_run_warns_and_it_is_not_simulated_at_this_one_s_seconds(
    pooch: Pooch,
) -> None:
    out = pooch.ok(f"plan {pooch.profile} -o plan.json --budget 85% --link 12GB/s --compute-scale 0.5").out
    assert "compute takes 0.5 times as long as measured" in out
    assert "link 12 GB/s each way, instead of spill" in out
    assert poochplan.Plan.load("plan.json").estimate
    run = f"run {pooch.small} --plan plan.json"
    warned = pooch.ok(run, "--steps 1 --timed 1").err
    assert "pooch: warning: poochplan: this plan is for another machine" in warned
    error = pooch.refused(run, "--timeline run.png --profile", pooch.profile)
    assert "--timeline: expected a plan for this machine" in error
    error = pooch.refused(f"simulate {pooch.profile} plan.json")
    assert f"expected one for the machine of {pooch.profile}, found one for another (compute takes 0.5 times" in error


def test_a_plan_for_ranks_of_one_host_records_their_shares_and_show_tells_them(pooch: Pooch) -> None:
    options = "--evaluations 50 --budget 85% --ranks-per-host 4 --host-budget 1TiB --timeline plan.png"
    result = pooch.ok(f"plan {pooch.profile} -o plan.json {options}")
    made, link = poochplan.Plan.load("plan.json"), Profile.load(pooch.profile).link
    assert made.link.ranks == 4
    assert made.link.inward.bandwidth_bytes_per_s == link.inward.bandwidth_bytes_per_s / 4
    assert (made.estimate, made.assumed) == (False, ())
    for shown in (result.out, pooch("show plan.json").out):
        text = " ".join(shown.split())
        assert "each of 4 ranks of a host has its share of the link" in text
        assert "each of 4 ranks of a host swaps at most 256 GiB, its share of the host budget" in text


def test_one_policy_decides_alone_and_the_plan_names_it(pooch: Pooch) -> None:
    result = pooch.ok(f"plan {pooch.profile} --budget 85% --policy greedy -o plan.json")
    assert result.err == ""
    assert re.search(r"^found +greedy, without a solver", result.out, re.MULTILINE)
    assert poochplan.Plan.load("plan.json").solve.policy == "greedy"


def test_all_policies_are_a_table_and_data_and_the_plan_is_the_ilps(pooch: Pooch) -> None:
    result = pooch.ok(f"plan {pooch.profile} --budget 85% --policy all -o plan.json --json")
    table = result.err[result.err.index("Policies, those that fit first") :]
    for name in all_policies():
        assert re.search(rf"^{name} +\S+ \S+ +(yes|no) +[+-]\d", table, re.MULTILINE), name
    assert re.search(r"^keep-all .* no .* - ", table, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 100
    assert poochplan.Plan.load("plan.json").solve.policy in ("ilp", "annealing")
    rows = {row["policy"]: row for row in result.data["policies"]}
    assert set(rows) == set(all_policies())
    assert (rows["ilp"]["step_s"], rows["ilp"]["ilp_margin"]) == (result.data["step_s"], 0)
    assert (rows["keep-all"]["fits"], rows["keep-all"]["ilp_margin"]) == (False, None)
    assert all(row["wall_s"] > 0 for row in rows.values())


BAR = "━"


def test_on_a_terminal_long_work_shows_a_bar_and_none_is_among_the_data(
    pooch: Pooch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what rich asks in place of isatty
    monkeypatch.setenv("COLUMNS", "200")
    for work in (
        f"profile {pooch.small} --iterations 1 -o p.json",
        "plan p.json --budget 90% --evaluations 50 -o plan.json",
        "sweep p.json -o s.csv --points 2 --policies swap-all,keep-all --processes 1",
    ):
        result = pooch.ok(work, "--json")
        assert BAR in result.err
        assert BAR not in result.out
    assert "4 of 4 done, last keep-all within" in result.err


def test_the_stages_of_profiling_come_one_after_another() -> None:
    told = ["warming up (2 steps)", "capturing one step", "measuring the link", "timing 5 steps", "verifying replays"]
    shares = [stage_share(text) for text in told]
    assert shares == sorted({share for share in shares if share is not None})
    assert len({*shares}) == len(told) <= len(STAGES)
    assert stage_share("mode auto chose run: it fits") is None


SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "inference.schema.json"


@needs_compiler
def test_a_forward_pass_alone_is_shown_written_and_told_from_a_training_step(pooch: Pooch) -> None:
    result = pooch.ok(f"profile {pooch.small} --inference --json")
    for row in ("peak, with that", "one by one", "caching allocator", "arena", "saved by the arena"):
        assert f"\n{row} " in result.err
    assert "Forward pass of small" in result.err
    assert "Wrote small.pass.json" in result.err
    written, found = json.loads(Path("small.pass.json").read_bytes()), PassProfile.load("small.pass.json")
    jsonschema.validate(written, json.loads(SCHEMA.read_bytes()))
    figures = {name: value for name, value in written.items() if name not in ("blocks", "model")}
    assert result.data == figures | {"profile": "small.pass.json"}
    assert found.iterations == 5
    inside_bytes = sum(-(-block.size_bytes // 512) * 512 for block in found.blocks if block.offset != OUTSIDE)
    assert found.separate_bytes == inside_bytes > found.arena_bytes > 0
    shown = pooch.ok("show small.pass.json").out
    assert "Forward pass of small" in shown
    assert "5 iterations" in shown
    pooch.ok(f"profile {pooch.small} --inference --iterations 2 -o pass.json")
    assert PassProfile.load("pass.json").iterations == 2
    for verb in ("plan small.pass.json --budget 60%", "sweep small.pass.json", "simulate small.pass.json plan.json"):
        line = pooch.refused(verb, code=1)
        assert "found a forward pass alone, of which nothing has to be moved" in line
        assert "poochplan.arena(model) serves it" in line
