"""``pooch run --compile``: a compiled model under a plan that is inside its graphs, against stock Inductor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poochplan.formats.plan import Plan
from tests.runtime.served import needs_compiler

from .conftest import Pooch


@needs_compiler
@pytest.mark.cpu_device
def test_a_compiled_run_makes_a_plan_keeps_it_and_is_bitwise_stock_inductor(
    pooch: Pooch, workloads: Path, tmp_path: Path
) -> None:
    boxed, plan = f"{workloads}:boxed", tmp_path / "compiled.plan.json"
    options = ("--compile", "--check", "--steps", 2, "--timed", 1, "--json")
    made = pooch("run", boxed, "--budget", "85%", "--save-plan", plan, "--time-limit", 2, "--iterations", 1, *options)
    assert made.code == 0, made.err
    assert f"Wrote {plan}" in made.err
    found = json.loads(made.out)
    assert (found["fallbacks"], found["difference"]) == (0, None)
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    assert Plan.load(plan).workload == "boxed"
    again = pooch("run", boxed, "--plan", plan, *options)
    assert again.code == 0, again.err
    assert json.loads(again.out)["difference"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --plan FILE, or --compile with --budget, found neither; name the plan to follow"),
        (("--compile",), "--compile: expected --budget or --plan beside it, found neither; add --budget 60%"),
        (("--budget", "60%"), "--budget: expected --compile beside it, found none; pooch plan makes a plan without it"),
        (("--compile", "--budget", "60%", "--plan", "p.json"), "expected --budget or --plan, found both; leave one"),
        (("--compile", "--plan", "p.json", "--plan", "q.json"), "--compile: expected one plan, found 2"),
        (("--plan", "p.json", "--save-plan", "q.json"), "--save-plan: expected --compile and --budget beside it"),
        (("--compile", "--plan", "p.json", "--save-plan", "q.json"), "expected --compile and --budget beside it"),
        (("--compile", "--budget", "60%", "--picture", "p.png"), "--picture: expected no --compile"),
        (("--compile", "--budget", "60%", "--timeline", "p.png"), "--timeline: expected no --compile"),
    ],
)
def test_options_that_do_not_go_together_are_one_clear_line(
    pooch: Pooch, workloads: Path, options: tuple[str, ...], message: str
) -> None:
    result = pooch("run", f"{workloads}:small", *options)
    assert result.code == 2
    assert message in result.error


def test_a_plan_with_replays_is_refused_without_compile(
    pooch: Pooch, workloads: Path, plan_path: Path, tmp_path: Path
) -> None:
    given = json.loads(plan_path.read_text())
    path = tmp_path / "replays.plan.json"
    path.write_text(json.dumps(given | {"replays": ["graph/node"]}))
    result = pooch("run", f"{workloads}:small", "--plan", path)
    assert result.code == 2
    assert "this plan is for a model that poochplan.compile has compiled" in result.error
    assert "(pooch run --compile)" in result.error
