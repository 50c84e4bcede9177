"""Bad input is one line that says what was expected, what was found and what to do, with the right exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poochplan import Plan, Profile, smallest_budget

Pooch = Any


def edited(path: Path, target: Path, **changes: object) -> Path:
    """A copy of a JSON file with some fields changed."""
    target.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


# -- the command line itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: VERB; see `pooch --help`"),
        (["profil"], "invalid choice: 'profil'"),
        (["plan", "p.json"], "expected --budget, --min or --device-memory, found none of them; see `pooch plan"),
        (["plan", "p.json", "--budget", "60%", "--min"], "argument --min: not allowed with argument --budget"),
        (["plan", "p.json", "--budget", "60%", "--threads", "none"], "a whole number of at least 1, found 'none'"),
        (["plan", "p.json", "--budget", "60%", "--gap", "-1"], "a number above 0, found '-1'"),
        (["plan", "p.json", "--budget", "60%", "--seed", "-1"], "a whole number of at least 0, found '-1'"),
        (
            ["plan", "p.json", "--budget", "60%", "--evaluations", "9", "--time-limit", "60"],
            "argument --time-limit: not allowed with argument --evaluations",
        ),
        (["run", "w.toml", "--plan", "p.json", "--steps", "0"], "a whole number of at least 1, found '0'"),
        (["profile", "w.toml", "--set", "batch"], "--set: expected name=value, such as batch_size=64, found 'batch'"),
        (["profile", "w.toml", "--set", "a=1", "--set", "a=2"], "--set: 'a' is given twice"),
        (["profile", "w.toml", "--throttle", "fast"], "--throttle: expected a rate such as 400MB/s"),
        (["profile", "w.toml", "--device", "tpu"], 'device: expected "cpu", "cuda" or "cuda:N", found \'tpu\''),
        (["profile", "w.toml", "-o", "missing/p.json"], "the folder missing does not exist"),
        (["plan", "p.json", "--budget", "60%", "--timeline", "plan.jpg"], "expected a file name that ends in .png"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(pooch: Pooch, arguments: list[str], message: str) -> None:
    result = pooch(*arguments)
    assert result.code == 2
    assert message in result.error


def test_a_cap_is_for_cuda_and_a_margin_is_for_a_cap(pooch: Pooch, workloads: Path, plan_path: Path) -> None:
    capped = pooch("run", f"{workloads}:small", "--plan", plan_path, "--cap")
    assert capped.code == 2
    assert capped.error == "--cap: expected a plan for cuda, whose allocator takes a limit, found one for cpu"
    alone = pooch("run", f"{workloads}:small", "--plan", plan_path, "--margin", "1GiB")
    assert alone.code == 2
    assert "--margin: expected --cap beside it" in alone.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(pooch: Pooch, workloads: Path) -> None:
    result = pooch("profile", f"{workloads}:small", "--device", "cuda")
    assert result.code == 2
    assert "expected a CUDA device, found none that torch can use" in result.error
    assert "a GPU that is not there with `pooch profile --mode fake --roofline h200` (or v100, a100)" in result.error


# -- workloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["nowhere.toml", "nowhere.py:build", "no_such_package.models:build", "nowhere", "a:b:"]
)
@pytest.mark.parametrize("verb", ["profile", "run"])
def test_a_workload_that_does_not_exist(pooch: Pooch, plan_path: Path, verb: str, target: str) -> None:
    result = pooch(verb, target, *(["--plan", plan_path] if verb == "run" else []))
    assert result.code == 2
    assert target.partition(":")[0] in result.error


@pytest.mark.parametrize(
    ("name", "options", "code", "said"),
    [
        ("smal", [], 2, ["no function 'smal'; did you mean small?"]),
        ("no_workload", [], 2, ["found torch.nn.modules.linear.Linear", "return poochplan.Workload(model=..., "]),
        ("small", ["--set", "batchsize=4"], 2, ["unknown parameter 'batchsize'; did you mean batch_size?"]),
        ("no_scalar", [], 1, ["step", "found shape [4, 8]"]),
        ("calls_backward", [], 1, ["step(): expected forward only, found that it calls backward"]),
        ("fails", [], 1, ["two lines of trouble", "-v"]),
        ("too_large", ["--mode", "run"], 1, ["model and data, expected memory for 4096 TiB", "--mode fake"]),
        ("grows_too_large", ["--mode", "run"], 1, ["step ran out of memory: expected memory for 4096", "--mode fake"]),
    ],
)
def test_a_workload_that_cannot_be_profiled_is_one_line(
    pooch: Pooch, workloads: Path, name: str, options: list[str], code: int, said: list[str]
) -> None:
    result = pooch("profile", f"{workloads}:{name}", *options)
    assert result.code == code
    assert [part for part in said if part not in result.error] == []
    assert not Path(f"{name}.profile.json").exists()


def test_verbose_shows_the_traceback_as_well(pooch: Pooch, workloads: Path) -> None:
    result = pooch("profile", f"{workloads}:fails", "-v")
    assert result.code == 1
    assert "Traceback (most recent call last)" in result.err
    assert "raise ValueError" in result.err
    assert "two lines of trouble" in result.err.splitlines()[-1]


# -- profiles and plans --------------------------------------------------------------------------------------------


FILES: dict[str, tuple[Callable[[Path, Path], object], int, list[str]]] = {
    "missing": (lambda good, bad: None, 2, ["no such {kind} file; make one with `pooch {kind}`"]),
    "truncated": (
        lambda good, bad: bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2]),
        1,
        ["truncated or not JSON", "make it again with `pooch {kind}`"],
    ),
    "newer": (
        lambda good, bad: edited(good, bad, schema_version=99),
        1,
        ["expected {kind} schema 1 or 2 or", "found schema 99; update poochplan"],
    ),
    "of another kind": (lambda good, bad: edited(good, bad, kind="other"), 1, ["expected a {kind}", "found kind "]),
}


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_a_file_that_cannot_be_read_is_one_line_that_names_the_command_that_makes_it(
    pooch: Pooch, workloads: Path, profile_path: Path, plan_path: Path, tmp_path: Path, kind: str, what: str
) -> None:
    spoil, code, said = FILES[what]
    bad = tmp_path / "bad.json"
    spoil(profile_path if kind == "profile" else plan_path, bad)
    asked = ("plan", bad, "--budget", "60%") if kind == "profile" else ("run", f"{workloads}:small", "--plan", bad)
    result = pooch(*asked)
    assert result.code == code
    assert [part for part in said if part.format(kind=kind) not in result.error] == []


def test_a_profile_with_a_wrong_field_names_it(pooch: Pooch, profile_path: Path, tmp_path: Path) -> None:
    wrong = edited(profile_path, tmp_path / "wrong.json", in_core_peak_bytes="much")
    result = pooch("plan", wrong, "--budget", "60%")
    assert result.code == 1
    assert "$.in_core_peak_bytes" in result.error


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_plan_for_another_model_names_the_first_layer_that_differs(
    pooch: Pooch, workloads: Path, plan_path: Path, check: list[str]
) -> None:
    result = pooch("run", f"{workloads}:small", "--plan", plan_path, "--set", "width=32", *check)
    assert result.code == 1
    assert "expected 0.weight float32[64, 64], found 0.weight float32[32, 32]" in result.error


def test_a_picture_needs_the_plans_own_profile(
    pooch: Pooch, workloads: Path, plan_path: Path, profile_path: Path, tmp_path: Path
) -> None:
    lone = tmp_path / "lone.json"
    lone.write_bytes(plan_path.read_bytes())
    result = pooch("run", f"{workloads}:small", "--plan", lone, "--timeline", "run.png")
    assert result.code == 2
    assert "expected the profile that the plan was made from" in result.error
    other = edited(profile_path, tmp_path / "other.json", ops_fingerprint="other")
    result = pooch("run", f"{workloads}:small", "--plan", lone, "--timeline", "run.png", "--profile", other)
    assert result.code == 2
    assert "is of another step; name it with --profile" in result.error


# -- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["plan", "--budget", "60"], ["sweep", "--budgets", "50%,60"]], ids=" ".join)
def test_a_budget_without_its_percent_sign_is_asked_about(pooch: Pooch, profile_path: Path, verb: list[str]) -> None:
    result = pooch(verb[0], profile_path, *verb[1:], "-o", "out.json")
    assert result.code == 2
    assert result.error == "budget: expected 60%, 8GiB, 800MB or bytes, found '60'; did you mean 60%?"


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_folder_that_is_not_there_is_told_before_the_profile_is_read(pooch: Pooch, verb: str) -> None:
    budget = ["--budget", "60%"] if verb == "plan" else []
    result = pooch(verb, "no-such-profile.json", *budget, "-o", "nowhere/out.json")
    assert result.code == 2
    assert result.error == "nowhere/out.json: the folder nowhere does not exist; create it or name another"


def test_the_smallest_budget_has_a_plan_no_smaller_one_has_and_the_message_names_it(
    pooch: Pooch, profile_path: Path
) -> None:
    smallest = smallest_budget(Profile.load(profile_path))
    result = pooch("plan", profile_path, "--min", "-o", "least.json", "--json")
    data = json.loads(result.out)
    assert (result.code, data["budget_bytes"]) == (0, smallest)
    assert data["peak_bytes"] <= smallest
    assert pooch("plan", profile_path, "--budget", smallest, "-o", "plan.json").code == 0
    memory = ("--min", "--device-memory", smallest - 1, "--margin", "0")
    for less in (("--budget", "1KiB"), ("--budget", smallest - 1), memory):
        result = pooch("plan", profile_path, *less, "-o", "less.json")
        assert (result.code, Path("less.json").exists()) == (3, False)
        assert f"{smallest} bytes" in result.error
    assert f"leaves beside the margin: expected at least {smallest} bytes" in result.error


def test_a_plan_that_keeps_all_predicts_the_cost_of_its_handles(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "120%", "--json", "-o", "plan.json")
    assert result.code == 0
    assert Plan.load("plan.json").prediction.runtime_s > 0  # no copy and no replay
    assert any("everything is kept" in note for note in json.loads(result.out)["notes"])


# -- outputs -------------------------------------------------------------------------------------------------------


def test_an_existing_output_is_not_overwritten_without_force(
    pooch: Pooch, workloads: Path, profile_path: Path, plan_path: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.png"
    mine.write_text("mine")
    refused = [
        ("profile", f"{workloads}:small", "-o", mine),
        ("plan", profile_path, "--budget", "85%", "-o", mine),
        ("plan", profile_path, "--budget", "85%", "-o", "plan.json", "--timeline", mine),
        ("run", f"{workloads}:small", "--plan", plan_path, "--timeline", mine),
        ("sweep", profile_path, "-o", mine),
        ("sweep", profile_path, "-o", "sweep.csv", "--png", mine),
    ]
    for arguments in refused:
        result = pooch(*arguments)
        assert result.code == 1
        assert "mine.png exists and will not be overwritten; pass --force" in result.error
    assert mine.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.png"]
    assert pooch("plan", profile_path, "--budget", "85%", "-o", mine, "--force").code == 0
    assert json.loads(mine.read_text())["kind"] == "plan"
    assert pooch("sweep", profile_path, "-o", mine, "--policies", "keep-all", "--points", "2", "--force").code == 0
    assert mine.read_text().startswith("policy,")


def test_a_crash_while_writing_leaves_no_file(
    pooch: Pooch, profile_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = pooch("plan", profile_path, "--budget", "85%", "-o", "plan.json")
    assert result.code == 1
    assert "No space left on device" in result.error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_with_code_130(pooch: Pooch, profile_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poochplan.cli.plan.plan", interrupt)
    result = pooch("plan", profile_path, "--budget", "85%", "-o", "plan.json")
    assert result.code == 130
    assert result.error == "interrupted"


def test_a_spill_folder_that_is_not_there(pooch: Pooch, workloads: Path, plan_path: Path) -> None:
    result = pooch("run", f"{workloads}:small", "--plan", plan_path, "--spill-dir", "nowhere")
    assert result.code == 1
    assert "spill directory nowhere: expected a folder, found none" in result.error


# -- verification --------------------------------------------------------------------------------------------------


def test_a_workload_that_returns_the_same_model_cannot_be_checked(
    pooch: Pooch, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(workloads.parent)
    target = f"{workloads.stem}:same_model"
    assert pooch("profile", target, "-o", "p.json", "--iterations", "1").code == 0
    assert pooch("plan", "p.json", "--budget", "200%", "-o", "plan.json").code == 0
    result = pooch("run", target, "--plan", "plan.json", "--check", "--timed", "1")
    assert result.code == 1
    assert "returned the same model twice" in result.error


def test_a_workload_that_ignores_the_seed_is_told_from_a_wrong_gradient(
    pooch: Pooch, workloads: Path, plan_path: Path
) -> None:
    result = pooch("run", f"{workloads}:unsteady", "--plan", plan_path, "--check", "--steps", "1", "--timed", "1")
    assert result.code == 1
    assert "not bitwise equal to in-core: step 0: loss differs" in result.error
    assert "the workload itself is not deterministic" in result.error
    assert "gradients bitwise equal" in result.out
