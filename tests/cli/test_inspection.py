"""``pooch show`` and ``pooch diff``: what files say, what differs between them, and where a run left its plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.run_record import RunRecord
from poochplan.report.differences import differences
from poochplan.report.tables import load_any
from poochplan.verify import contradiction
from tests.cli.conftest import Pooch, Result
from tests.processes import python
from tests.runtime.served import needs_compiler

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def tighter(tmp_path_factory: pytest.TempPathFactory, profile: poochplan.Profile) -> Path:
    """A plan of the same profile for the smallest budget."""
    plan = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=100)
    return plan.save(tmp_path_factory.mktemp("plans") / "tighter.plan.json")


# -- show ----------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_it_is_for_where_it_was_made_and_what_it_decides(pooch: Pooch, plan: poochplan.Plan) -> None:
    result = pooch.ok("show", pooch.plan)
    assert result.err == ""
    names = "for", "inputs", "versions", "host", "budget", "predicted peak", "predicted step", "decisions", "points"
    assert [name for name in names if not re.search(rf"^{name} +\S", result.out, re.MULTILINE)] == []
    assert "0 float32[128, 64]" in result.out
    assert "Decisions by layer" in result.out
    data = pooch.json("show", pooch.plan)
    assert (data["kind"], data["budget_bytes"], data["fingerprint"]) == ("plan", plan.budget_bytes, plan.fingerprint)
    shown = sum(layer[name] for layer in data["layers"] for name in ("keep", "swap", "recompute"))
    assert shown == sum(value.size_bytes for value in plan.saved)


def test_a_profile_says_its_layers(pooch: Pooch, profile: poochplan.Profile) -> None:
    result = pooch.ok(f"show {pooch.profile} --layers 2")
    assert result.err == ""
    assert re.search(r"What layers save and cost \(2 of \d+\)", result.out)
    data = pooch.json("show", pooch.profile)
    assert data["counts"] == {name: len(getattr(profile, name)) for name in ("ops", "values", "points")}
    assert data["in_core_peak_bytes"] == profile.in_core_peak_bytes


def test_a_file_of_an_earlier_release_says_what_it_does_not_know(pooch: Pooch) -> None:
    for name in ("plan-v1.json", "profile-v1.json"):
        assert re.search(r"^host +not written in this file", pooch.ok("show", DATA / name).out, re.MULTILINE)


def test_several_plans_are_shown_as_the_set_that_they_make(pooch: Pooch, tmp_path: Path, plan: poochplan.Plan) -> None:
    other = msgspec.structs.replace(plan, inputs=("0 float32[96, 64]",)).save(tmp_path / "96.json")
    out = pooch.ok("show", pooch.plan, other).out
    assert "Set of 2 plans for small" in out
    assert "0 float32[96, 64]" in out
    assert "found plans 1 and 2 both for" in pooch.refused("show", pooch.plan, pooch.plan)


def test_what_is_no_file_of_ours_is_one_line(pooch: Pooch, tmp_path: Path) -> None:
    for content, message in (
        ("{", "truncated or not JSON of this package"),
        ("[]", "truncated or not JSON of this package"),
        ('{"kind": "cake"}', "found kind 'cake'"),
        ("{}", "found one that does not say its kind"),
    ):
        (tmp_path / "other.json").write_text(content)
        assert message in pooch.refused("show other.json", code=1)


def test_files_are_looked_at_and_planned_from_without_torch_and_pictures(
    plan_path: Path, profile_path: Path, tmp_path: Path
) -> None:
    plan, profile = str(plan_path), str(profile_path)
    commands = [
        ["show", plan], ["show", profile], ["diff", plan, plan], ["diff", profile, profile],
        ["simulate", profile, plan, "--trace", str(tmp_path / "trace.json")],
        ["plan", profile, "--budget", "85%", "-o", str(tmp_path / "plan.json")],
        ["sweep", profile, "-o", str(tmp_path / "s.csv"), "--policies", "keep-all,swap-all", "--points", "2"],
    ]  # fmt: skip
    code = (
        f"import sys; from poochplan.cli import main; codes = [main(command) for command in {commands!r}]; "
        "loaded = {'torch', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}, codes {codes}' if loaded or any(codes) else 0)"
    )
    python(code, is_fresh=True)
    assert (tmp_path / "plan.json").is_file()
    assert (tmp_path / "s.csv").is_file()


# -- diff ----------------------------------------------------------------------------------------------------------


def test_equal_files_end_with_code_0_different_ones_with_1_and_trouble_with_2(
    pooch: Pooch, tighter: Path, tmp_path: Path
) -> None:
    assert pooch("diff", pooch.plan, pooch.plan).code == 0
    assert pooch("diff", pooch.profile, pooch.profile).code == 0
    assert pooch("diff", pooch.plan, tighter).code == 1
    (tmp_path / "broken.json").write_text("{")
    for broken in ("none.json", "broken.json"):
        assert broken in pooch.refused("diff", pooch.plan, broken)
    assert pooch.refused("diff", pooch.plan, pooch.profile).endswith("found a plan and a profile")


def test_two_plans_differ_in_what_the_values_and_points_of_both_say(pooch: Pooch, tighter: Path) -> None:
    first, second = poochplan.Plan.load(pooch.plan), poochplan.Plan.load(tighter)
    result = pooch("diff", pooch.plan, tighter, "--json")
    data = result.data
    assert (result.code, data["differs"], data["same_step"]) == (1, True, True)
    figures = {figure["name"]: (figure["first"], figure["second"]) for figure in data["figures"]}
    assert figures["budget"] == (first.budget_bytes, second.budget_bytes)
    assert figures["predicted peak"] == (first.prediction.peak_bytes, second.prediction.peak_bytes)
    changed = {value["name"]: (value["first"], value["second"]) for value in data["values"]}
    pairs = zip(first.values, second.values, strict=True)
    assert changed == {one.name: (one.decision, two.decision) for one, two in pairs if one.decision is not two.decision}
    assert data["points"]
    assert "Decisions that changed, by layer" in pooch("diff", pooch.plan, tighter).out


def test_one_changed_decision_is_the_only_difference_of_values(plan: poochplan.Plan) -> None:
    number = next(n for n, value in enumerate(plan.values) if value.decision is Decision.KEEP)
    value = msgspec.structs.replace(plan.values[number], decision=Decision.RECOMPUTE)
    other = msgspec.structs.replace(plan, values=(*plan.values[:number], value, *plan.values[number + 1 :]))
    found = differences(plan, other)
    (changed,) = found.data["values"]
    assert (changed["name"], changed["first"], changed["second"]) == (value.name, "keep", "recompute")
    assert changed["size_bytes"] == value.size_bytes
    assert (found.figures, found.data["points"]) == ([], [])
    slower = msgspec.structs.replace(plan, solve=msgspec.structs.replace(plan.solve, wall_s=9.0))
    assert not differences(plan, slower)


def test_plans_of_different_steps_do_not_compare_their_points(pooch: Pooch) -> None:
    result = pooch("diff", pooch.plan, DATA / "plan-v1.json")
    assert result.code == 1
    assert "The plans are for steps that save or use other values" in result.out


def test_two_profiles_differ_in_their_times_and_in_the_op_at_which_the_steps_part(profile: poochplan.Profile) -> None:
    times = msgspec.structs.replace(profile.times, step_s=2 * profile.times.step_s)
    slower = differences(profile, msgspec.structs.replace(profile, times=times))
    assert [figure.name for figure in slower.figures] == ["step"]
    assert (slower.data["first_op"], slower.data["layers"]) == ("", [])
    op = msgspec.structs.replace(profile.ops[3], name="aten.other.default")
    other = differences(profile, msgspec.structs.replace(profile, ops=(*profile.ops[:3], op, *profile.ops[4:])))
    assert other.data["first_op"].startswith(f"op 3: {profile.ops[3].name} in ")
    assert "aten.other.default" in other.data["first_op"]
    doubled = msgspec.structs.replace(profile.ops[0], duration_s=1.0)
    slower = differences(profile, msgspec.structs.replace(profile, ops=(doubled, *profile.ops[1:])))
    (layer,) = slower.data["layers"]
    assert layer["layer"] == profile.ops[0].layer


# -- runs ----------------------------------------------------------------------------------------------------------


def run(pooch: Pooch, plan_path: Path, *more: object) -> Result:
    return pooch(f"run {pooch.small} --plan {plan_path} --steps 2 --timed 1 -o run.json", *more)


def test_a_run_that_kept_to_its_plan_says_so_and_is_told_from_one_of_another_plan(pooch: Pooch, tighter: Path) -> None:
    result = run(pooch, pooch.plan, "--json")
    assert (result.code, result.data["steps"], result.data["left_steps"]) == (0, 3, 0)
    assert result.data == json.loads(Path("run.json").read_text())
    assert isinstance(load_any("run.json"), RunRecord)
    assert "The run kept to its plan." in pooch.ok("diff", pooch.plan, "run.json").out
    assert "Run of small" in pooch("show run.json").out
    error = pooch.refused("diff", tighter, "run.json")
    assert f"found one of plan {poochplan.Plan.load(pooch.plan).fingerprint}" in error


def test_a_run_that_left_its_plan_says_at_which_point_and_in_which_layer(pooch: Pooch, plan: poochplan.Plan) -> None:
    left = run(pooch, pooch.plan, "--set batch_size=96")
    assert left.code == 6
    assert "within the budget; 3 of 3 steps LEFT THE PLAN" in left.out
    line = "3 of 3 steps left the plan: in 0, expected float32[128, 64] of 32768 bytes, found float32[96, 64] of 24576"
    assert left.err.splitlines()[-1].startswith(f"pooch: error: {line}")
    result = pooch("diff run.json", pooch.plan, "--json")
    assert result.code == 1
    assert [one["step"] for one in result.data["departures"]] == [1, 2, 3]
    first = result.data["departures"][0]
    value = plan.values[first["index"]]
    assert (first["at"], first["value"], first["layer"]) == ("save", value.name, value.layer)
    assert first["planned"] == f"float32[128, 64] of {value.size_bytes} bytes"
    assert first["found"] == f"float32[96, 64] of {96 * 64 * 4} bytes"
    out = pooch("diff", pooch.plan, "run.json").out
    assert "Where steps left the plan (3 of 3)" in out
    assert "float32[96, 64]" in out
    record = json.loads(Path("run.json").read_text())
    assert (record["steps"], record["left_steps"]) == (3, 3)
    again = "--set batch_size=96 --on-divergence error --force"
    assert run(pooch, pooch.plan, again).code == 6, "asked to end at the first departure it has the same code"


def test_a_run_over_its_budget_ends_with_code_5_and_writes_what_it_found(
    pooch: Pooch, tmp_path: Path, plan: poochplan.Plan
) -> None:
    less = msgspec.structs.replace(plan, budget_bytes=plan.prediction.peak_bytes - 512).save(tmp_path / "less.json")
    result = run(pooch, less, "--json")
    assert result.code == 5
    assert f"over the budget: expected at most {plan.prediction.peak_bytes - 512} bytes" in result.err.splitlines()[-1]
    assert result.data["measured_peak_bytes"] == plan.prediction.peak_bytes
    result = pooch("diff", less, "run.json")
    assert result.code == 1
    assert "OVER THE BUDGET" in result.out


@needs_compiler
def test_a_step_that_contradicts_its_plan_is_noted(pooch: Pooch, tmp_path: Path, plan: poochplan.Plan) -> None:
    prediction = msgspec.structs.replace(plan.prediction, in_core_step_s=1000.0, step_s=1000.0)
    other = msgspec.structs.replace(plan, prediction=prediction).save(tmp_path / "other.json")
    result = run(pooch, other)
    assert result.code == 0
    assert re.search(r"^note +the planned step took", result.out, re.MULTILINE)
    told = " ".join(result.out.split())
    assert "where the plan predicts 1e+03 s: the machine was busy during one of the two; profile again" in told
    left = run(pooch, other, "--set batch_size=96 --force --json")
    assert (left.code, left.data["contradiction"]) == (6, "")  # another step takes another time
    assert left.data["why_not_served"] == "steps left the plan"


@pytest.mark.parametrize(
    ("said_s", "planned_s", "in_core_s", "told"),
    [
        (0.979, 0.067, None, "the planned step took 67 ms, where the plan predicts 979 ms"),
        (0.979, 1.2, 0.067, "the in-core step took 67 ms, where the profile says 979 ms"),
        (0.1, 0.16, None, "the planned step took 160 ms"),
        (0.1, 0.14, None, ""),
        (0.1, 0.06, None, ""),
        (0.001, 0.02, None, ""),
    ],
)
def test_a_measured_time_contradicts_by_more_than_half_and_20_ms(
    said_s: float, planned_s: float, in_core_s: float | None, told: str, plan: poochplan.Plan
) -> None:
    prediction = msgspec.structs.replace(plan.prediction, in_core_step_s=said_s, step_s=said_s, is_timed_alone=True)
    plan = msgspec.structs.replace(plan, prediction=prediction)
    found = contradiction(plan, planned_s, in_core_s)
    assert found.startswith(told)
    assert bool(found) is bool(told)
    assert contradiction(msgspec.structs.replace(plan, estimate=True), planned_s, in_core_s) == ""
