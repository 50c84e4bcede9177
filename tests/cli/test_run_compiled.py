"""``pooch run --compile``: a compiled model under a plan that is inside its graphs, against stock Inductor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poochplan.formats.plan import Plan
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler


@needs_compiler
@pytest.mark.cpu_device
def test_a_compiled_run_makes_a_plan_keeps_it_and_is_bitwise_stock_inductor(pooch: Pooch, workloads: Path) -> None:
    run = f"run {workloads}:boxed --compile --check --steps 2 --timed 1 --json"
    made = pooch.ok(run, "--budget 85% --save-plan compiled.plan.json --time-limit 2 --iterations 1")
    assert "Wrote compiled.plan.json" in made.err
    assert (made.data["fallbacks"], made.data["difference"]) == (0, None)
    assert made.data["measured_peak_bytes"] <= made.data["budget_bytes"]
    assert Plan.load("compiled.plan.json").workload == "boxed"
    assert pooch.ok(run, "--plan compiled.plan.json").data["difference"] is None


def test_a_plan_with_replays_is_refused_without_compile(pooch: Pooch, small: str, plan_path: Path) -> None:
    given = json.loads(plan_path.read_text())
    Path("replays.plan.json").write_text(json.dumps(given | {"replays": ["graph/node"]}))
    error = pooch.refused(f"run {small} --plan replays.plan.json")
    assert "this plan is for a model that poochplan.compile has compiled" in error
    assert "(pooch run --compile)" in error
