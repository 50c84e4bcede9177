"""Bad input is one line that says what was expected, what was found and what to do, with the right exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from poochplan import Plan, Profile, smallest_budget
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler

FIT = "fit {small} --device-memory 1MiB --roofline 50e12,2e12 --margin 0 --evaluations 300"
REFUSED = """
2  | ^the following arguments are required: VERB; see `pooch --help`
2 profil | invalid choice: 'profil'
2 show none.json | ^none.json: no such file; name one that pooch profile

2 profile w.toml --set batch | --set: expected name=value, such as batch_size=64, found 'batch'
2 profile w.toml --set a=1 --set a=2 | --set: 'a' is given twice
2 profile w.toml --throttle fast | --throttle: expected a rate such as 400MB/s
2 profile w.toml --device tpu | device: expected "cpu", "cuda" or "cuda:N", found 'tpu'
2 profile w.toml -o missing/p.json | the folder missing does not exist
2 profile nowhere.toml | ^nowhere.toml: no such workload file
1 profile {workloads}:no_scalar | step | found shape [4, 8]
1 profile {workloads}:calls_backward | step(): expected forward only, found that it calls backward
1 profile {workloads}:fails | two lines of trouble | -v
1 profile {workloads}:too_large --mode run | model and data, expected memory for 4096 TiB | --mode fake
1 profile {workloads}:grows_too_large --mode run
  step ran out of memory: expected memory for 4096
  --mode fake
2 profile {small} --mode run --roofline v100
  --roofline: mode run measures durations; drop it, or add --mode fake
2 profile {small} --mode swap-all --roofline v100 | --roofline: mode swap-all measures durations; drop it
2 profile {small} --mode fake --iterations 7 | --iterations: mode fake times no steps; drop --iterations
2 profile {small} --roofline v100 --iterations 7 | --iterations: mode fake times no steps; drop --iterations
2 profile {small} --mode fake --roofline v100 --throttle 1GB/s | --throttle: a roofline moves no bytes
2 profile {small} --mode fake --roofline v100 --cached-link
  ^--cached-link: a roofline's link is a preset; drop --cached-link$
2 profile {small} --inference --mode fake | ^--mode fake: with --inference
2 profile {small} --inference --mode swap-all | ^--mode swap-all: with --inference
2 profile {small} --inference --throttle 1GB/s | ^--throttle: with --inference
2 profile {small} --inference --accumulate | ^--accumulate: with --inference
2 profile {small} --inference --top 3 | ^--top: with --inference
2 profile {small} --nproc 1 | --nproc: expected a whole number of at least 2, found '1'
2 profile {small} --nproc 2 --mode fake
  --nproc: expected steps of several ranks, found --mode fake: a step without memory
2 profile {small} --nproc 2 --roofline v100 | --nproc: expected steps of several ranks, found --roofline
2 profile {small} --nproc 2 --inference | --nproc: expected steps of several ranks, found --inference
2 profile {small} --nproc 2 --cached-link | --nproc: expected steps of several ranks, found --cached-link

2 plan p.json | expected --budget, --min or --device-memory, found none of them; see `pooch plan
2 plan p.json --budget 60% --min | argument --min: not allowed with argument --budget
2 plan p.json --budget 60% --threads none | a whole number of at least 1, found 'none'
2 plan p.json --budget 60% --gap -1 | a number above 0, found '-1'
2 plan p.json --budget 60% --seed -1 | a whole number of at least 0, found '-1'
2 plan p.json --budget 60% --evaluations 9 --time-limit 60
  argument --time-limit: not allowed with argument --evaluations
2 plan p.json --budget 60% --timeline plan.jpg | expected a file name that ends in .png
2 plan no-such-profile.json --budget 60% -o nowhere/out.json
  ^nowhere/out.json: the folder nowhere does not exist; create it or name another$
2 plan p.json --budget 60% -o /proc/p.json | ^/proc/p.json: the folder /proc cannot be written (No such file
2 plan . --budget 60% | ^.: expected a profile, found a folder; name a file in it$
2 show . | ^.: expected a profile, a plan or a run, found a folder; name a file in it$
2 plan none.json --budget 60% | ^none.json: no such profile file; make one with `pooch profile`$
2 plan {profile} -o p.json --budget 60 | ^budget: expected 60%, 8GiB, 800MB or bytes, found '60'; did you mean 60%?$
2 plan {profile} -o p.json --budget 0% | ^budget: | found '0%'; a budget is more than nothing$
2 plan {profile} -o p.json --budget 0 | ^budget: | found '0'; a budget is more than nothing$
2 plan {profile} -o p.json --budget 0.0 | ^budget: | found '0.0'; a budget is more than nothing$
2 plan {profile} -o p.json --budget 60% --max-gap wide | --max-gap: expected a share such as 30% or 0.3, found 'wide'
2 plan {profile} -o p.json --budget 60% --evaluations 20 --threads 2 | threads: expected 1 with evaluations, found 2
2 plan {profile} -o p.json --budget 60% --link 0GB/s | a rate above 0 such as 12GB/s
2 plan {profile} -o p.json --budget 60% --link=-1GB/s | found '-1GB/s'
2 plan {profile} -o p.json --budget 60% --compute-scale 0 | --compute-scale: expected a number above 0, found '0'
2 plan {profile} -o p.json --budget 60% --margin 1GiB | --margin: expected --device-memory beside it
2 plan {profile} -o p.json --device-memory lots | --device-memory: expected bytes such as 8GiB
2 plan {profile} -o p.json --device-memory 512MiB | expected more than the margin of 512 MiB
2 plan {profile} -o p.json --device-memory 1GiB --margin some | --margin: expected bytes such as 8GiB
2 plan {profile} -o p.json --device-memory 1GiB --budget 600MiB | --budget: expected at most 536870912 bytes
3 plan {profile} -o p.json --device-memory 4KiB --margin 0 | device memory: expected more than the
2 plan {profile} -o p.json --budget 85% --ranks-per-host 0
  --ranks-per-host: expected a whole number of at least 1, found '0'
2 plan {profile} -o p.json --budget 90% --policy greedy --arena on
  --arena on: expected --policy ilp, which alone plans for an arena, found greedy
3 plan {profile} -o p.json --budget 85% --policy keep-all
  the plan of policy 'keep-all' does not fit
  raise the budget, or take policy 'ilp'

2 sweep no-such-profile.json -o nowhere/out.json
  ^nowhere/out.json: the folder nowhere does not exist; create it or name another$
2 sweep . --points 2 | ^.: expected a profile, found a folder; name a file in it$
2 sweep {profile} -o /proc/s.csv | ^/proc/s.csv: the folder /proc cannot be written
2 sweep {profile} -o s.csv --budgets 50%,60
  ^budget: expected 60%, 8GiB, 800MB or bytes, found '60'; did you mean 60%?$
2 sweep {profile} -o s.csv --policies ilp,clever | policy 'clever' is unknown: expected ilp
2 sweep {profile} -o s.csv --policies ilp,,greedy | --policies: expected names or sizes with commas between them
2 sweep {profile} -o s.csv --budgets 60% --points 3 | not allowed with argument --budgets
2 sweep {profile} -o s.csv --points 1 | a whole number of at least 2, found '1'
3 sweep {profile} -o s.csv --device-memory 513KiB --margin 512KiB | expected at least
2 sweep {profile} -o s.csv --budgets 2GiB --device-memory 1GiB | --budgets: expected at most 536870912 bytes
2 sweep {profile} -o s.csv --png s.jpg | expected a file name that ends in .png

2 simulate {profile} {plan} --trace trace.txt | expected a file name that ends in .json
2 simulate {profile} {plan} --trace nowhere/t.json | the folder nowhere does not exist
2 show {plan} --picture strip.pdf | expected a file name that ends in .png
2 show {plan} {plan} --picture two.png | expected one profile or one plan to draw, found 2 files

2 run w.toml --plan p.json --steps 0 | a whole number of at least 1, found '0'
2 run {small} --plan none.json | ^none.json: no such plan file; make one with `pooch plan`$
2 run {small} --plan {plan} --trace trace.txt | expected a file name that ends in .json
2 run {small} --plan {plan} --trace nowhere/t.json | the folder nowhere does not exist
2 run no_such_package.models:build --plan {plan} | no module named 'no_such_package'
1 run {small} --plan {plan} --set width=32
  expected 0.weight float32[64, 64], found 0.weight float32[32, 32]
1 run {small} --plan {plan} --set width=32 --check
  expected 0.weight float32[64, 64], found 0.weight float32[32, 32]
2 run {small} --plan {plan} --cap
  ^--cap: expected a plan for cuda, whose allocator takes a limit, found one for cpu; leave it out$
2 run {small} --plan {plan} --margin 1GiB | --margin: expected --cap beside it
1 run {small} --plan {plan} --spill-dir nowhere | spill directory nowhere: expected a folder, found none
2 run {small} | expected --plan FILE, or --compile with --budget, found neither; name the plan to follow
2 run {small} --compile | --compile: expected --budget or --plan beside it, found neither; add --budget 60%
2 run {small} --budget 60%
  --budget: expected --compile beside it, found none; pooch plan makes a plan without it
2 run {small} --compile --budget 60% --plan p.json | expected --budget or --plan, found both; leave one
2 run {small} --compile --plan p.json --plan q.json | --compile: expected one plan, found 2
2 run {small} --plan p.json --save-plan q.json | --save-plan: expected --compile and --budget beside it
2 run {small} --compile --plan p.json --save-plan q.json | expected --compile and --budget beside it
2 run {small} --compile --budget 60% --picture p.png | --picture: expected no --compile
2 run {small} --compile --budget 60% --timeline p.png | --timeline: expected no --compile

2 fit {small} --vary batch_size | ^device memory: expected a size such as 16GiB, found none; name it$
2 {fit} --vary batchsize | unknown parameter 'batchsize'; did you mean batch_size?; it takes width, depth
2 {fit} --vary batch_size --set batch_size=4 | expected it to be varied alone, found it set to 4
3 {fit} --vary batch_size --device-memory 64KiB | the smallest possible peak of batch_size 2
2 {fit} --vary batch_size --max-overhead 30 | expected a share such as 30% or 0.3, found '30'
2 {fit} --vary batch_size --from 9 --to 8 | expected values from 1 up, found 9 to 8
2 {fit} --vary batch_size --roofline v1000 | roofline: expected v100, a100, h100, h200
2 {fit} --vary batch_size -o plan.txt | expected a file name that ends in .json
2 fit char_rnn --vary lr --device-memory 1GiB --roofline 50e12,2e12
  lr: expected a parameter that is a whole number, found 0.002 of type float
  those of char_rnn are: batch_size, sequence_length, width, layers, chunks, seed
"""
"""Exit code, command and what its line says, after a bar or on lines of their own; ``^`` and ``$`` are its ends."""
CASES = re.split(r"\n+(?=\d)", REFUSED.strip())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.splitlines()[0])
def test_bad_input_is_one_line_with_its_code_and_nothing_is_written(pooch: Pooch, tmp_path: Path, case: str) -> None:
    asked, *said = re.split(r" \| |\n  ", case)
    code, _, command = asked.partition(" ")
    names = {
        "workloads": pooch.workloads,
        "small": f"{pooch.workloads}:small",
        "profile": pooch.profile,
        "plan": pooch.plan,
    }
    error = pooch.refused(command.replace("{fit}", FIT).format(**names), code=int(code))
    assert [part for part in said if part not in f"^{error}$"] == [], error
    assert said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(pooch: Pooch) -> None:
    error = pooch.refused(f"profile {pooch.small} --device cuda")
    assert "expected a CUDA device, found none that torch can use" in error
    assert "a GPU that is not there with `pooch profile --mode fake --roofline h200` (or v100, a100)" in error


def test_verbose_shows_the_traceback_as_well(pooch: Pooch) -> None:
    result = pooch(f"profile {pooch.workloads}:fails -v")
    assert result.code == 1
    assert "Traceback (most recent call last)" in result.err
    assert "raise ValueError" in result.err
    assert "two lines of trouble" in result.err.splitlines()[-1]


# -- profiles and plans --------------------------------------------------------------------------------------------


def edited(path: Path, target: Path, **changes: object) -> Path:
    """A copy of a JSON file with some fields changed."""
    target.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def test_a_profile_with_a_wrong_field_names_it(pooch: Pooch, tmp_path: Path) -> None:
    wrong = edited(pooch.profile, tmp_path / "wrong.json", in_core_peak_bytes="much")
    assert "$.in_core_peak_bytes" in pooch.refused(f"plan {wrong} --budget 60%", code=1)


def test_a_picture_needs_the_plans_own_profile(pooch: Pooch, tmp_path: Path) -> None:
    (tmp_path / "lone.json").write_bytes(pooch.plan.read_bytes())
    run = f"run {pooch.small} --plan lone.json --timeline run.png"
    assert "expected the profile that the plan was made from" in pooch.refused(run)
    other = edited(pooch.profile, tmp_path / "other.json", ops_fingerprint="other")
    assert "is of another step; name it with --profile" in pooch.refused(run, "--profile", other)


# -- budgets -------------------------------------------------------------------------------------------------------


def test_the_smallest_budget_has_a_plan_no_smaller_one_has_and_the_message_names_it(pooch: Pooch) -> None:
    smallest = smallest_budget(Profile.load(pooch.profile))
    data = pooch.json(f"plan {pooch.profile} --evaluations 50 --min -o least.json")
    assert data["peak_bytes"] <= data["budget_bytes"] == smallest
    pooch.ok(f"plan {pooch.profile} --evaluations 50 --budget {smallest} -o plan.json")
    memory = f"--min --device-memory {smallest - 1} --margin 0"
    for less in ("--budget 1KiB", f"--budget {smallest - 1}", memory):
        error = pooch.refused(f"plan {pooch.profile} -o less.json {less}", code=3)
        assert f"{smallest} bytes" in error
        assert not Path("less.json").exists()
    assert f"leaves beside the margin: expected at least {smallest} bytes" in error


def test_a_plan_that_keeps_all_predicts_the_cost_of_its_handles(pooch: Pooch) -> None:
    data = pooch.json(f"plan {pooch.profile} --budget 120% -o plan.json")
    assert Plan.load("plan.json").prediction.runtime_s > 0  # no copy and no replay
    assert any("everything is kept" in note for note in data["notes"])


# -- outputs -------------------------------------------------------------------------------------------------------


def test_an_existing_output_is_not_overwritten_without_force(pooch: Pooch, tmp_path: Path) -> None:
    for name in ("mine.png", "mine.json"):
        (tmp_path / name).write_text("mine")
    for command in (
        f"profile {pooch.small} -o mine.png",
        f"plan {pooch.profile} --budget 85% -o mine.png",
        f"plan {pooch.profile} --budget 85% -o plan.json --timeline mine.png",
        f"run {pooch.small} --plan {pooch.plan} --timeline mine.png",
        f"run {pooch.small} --plan {pooch.plan} --trace mine.json",
        f"simulate {pooch.profile} {pooch.plan} --trace mine.json",
        f"show {pooch.plan} --picture mine.png",
        f"sweep {pooch.profile} -o mine.png",
        f"sweep {pooch.profile} -o sweep.csv --png mine.png",
    ):
        error = pooch.refused(command, code=1)
        assert re.search(r"mine\.(png|json) exists and will not be overwritten; pass --force", error)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine.png": "mine", "mine.json": "mine"}
    pooch.ok(f"plan {pooch.profile} --budget 85% -o mine.png --force")
    assert json.loads(Path("mine.png").read_text())["kind"] == "plan"
    pooch.ok(f"sweep {pooch.profile} -o mine.png --policies keep-all --points 2 --force")
    assert Path("mine.png").read_text().startswith("policy,")


def test_a_disk_that_is_full_is_one_line(pooch: Pooch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in pooch.refused(f"plan {pooch.profile} --budget 85% -o plan.json", code=1)
    assert list(Path().iterdir()) == []


def test_an_interrupt_ends_with_code_130(pooch: Pooch, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poochplan.cli.plan.plan", interrupt)
    assert pooch.refused(f"plan {pooch.profile} --budget 85% -o plan.json", code=130) == "interrupted"


# -- verification --------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_workload_that_returns_the_same_model_cannot_be_checked(
    pooch: Pooch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pooch.workloads.parent)
    target = f"{pooch.workloads.stem}:same_model"
    pooch.ok(f"profile {target} -o p.json --iterations 1")
    pooch.ok("plan p.json --budget 200% -o plan.json")
    assert "returned the same model twice" in pooch.refused(f"run {target} --plan plan.json --check --timed 1", code=1)


def test_a_workload_that_ignores_the_seed_is_told_from_a_wrong_gradient(pooch: Pooch) -> None:
    result = pooch(f"run {pooch.workloads}:unsteady --plan {pooch.plan} --check --steps 1 --timed 1")
    assert result.code == 1
    assert "not bitwise equal to in-core: step 0: loss differs" in result.error
    assert "the workload itself is not deterministic" in result.error
    assert "gradients bitwise equal" in result.out
