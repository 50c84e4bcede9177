"""``pooch profile`` of a step that no machine holds, and of a forward pass alone; ``pooch run --compile``."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import OUTSIDE, Plan
from poochplan.formats.profile import Profile
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler

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
    for verb in ("plan small.pass.json --budget 60%", "sweep small.pass.json", "simulate small.pass.json plan.json"):
        line = pooch.refused(verb, code=1)
        assert "found a forward pass alone, of which nothing has to be moved" in line
        assert "poochplan.arena(model) serves it" in line


@pytest.mark.rest
def test_a_workload_larger_than_memory_is_profiled_and_planned(pooch: Pooch) -> None:
    size = "--set width=30000 --set depth=8 --set batch_size=1000000"
    result = pooch.ok(f"profile {pooch.small} --mode fake --roofline v100 -o big.json {size}")
    assert result.err == ""
    assert "v100 (roofline)" in result.out
    profile = Profile.load("big.json")
    assert (profile.mode, profile.link.name) == ("fake", "pcie3")
    assert profile.in_core_peak_bytes > 10**12
    assert pooch.ok("plan big.json --budget 80%").err == ""


@pytest.mark.rest
def test_what_is_known_of_memory_is_one_line_of_the_table(pooch: Pooch) -> None:
    pooch.ok(f"profile {pooch.small} --mode fake -o here.json --json")
    (note,) = (one for one in Profile.load("here.json").notes if "take and give back inside" in one)
    assert "\n" not in note
    assert note.split(";")[0].split(":")[0][:40] in " ".join(pooch("show here.json").out.split())


@pytest.mark.rest
def test_a_plan_with_a_roofline_s_times_runs_only_when_forced(pooch: Pooch) -> None:
    pooch.ok(f"profile {pooch.small} --mode fake --roofline v100 -o v100.json")
    pooch.ok("plan v100.json --budget 100% -o plan.json")
    run = f"run {pooch.small} --plan plan.json --steps 1 --timed 1"
    assert "or pass force=True (pooch run --force)" in pooch.refused(run)
    pooch.ok(run, "--force")


@needs_compiler
@pytest.mark.cpu_device
@pytest.mark.rest
def test_a_compiled_run_makes_a_plan_keeps_it_and_is_bitwise_stock_inductor(pooch: Pooch) -> None:
    run = f"run {pooch.workloads}:boxed --compile --check --steps 2 --timed 1 --json"
    made = pooch.ok(run, "--budget 85% --save-plan compiled.plan.json --time-limit 2 --iterations 1")
    assert "Wrote compiled.plan.json" in made.err
    assert (made.data["fallbacks"], made.data["difference"]) == (0, None)
    assert made.data["measured_peak_bytes"] <= made.data["budget_bytes"]
    assert Plan.load("compiled.plan.json").workload == "boxed"
    assert pooch.ok(run, "--plan compiled.plan.json").data["difference"] is None


@pytest.mark.rest
def test_a_plan_with_replays_is_refused_without_compile(pooch: Pooch) -> None:
    given = json.loads(pooch.plan.read_text())
    Path("replays.plan.json").write_text(json.dumps(given | {"replays": ["graph/node"]}))
    error = pooch.refused(f"run {pooch.small} --plan replays.plan.json")
    assert "this plan is for a model that poochplan.compile has compiled" in error
    assert "(pooch run --compile)" in error
