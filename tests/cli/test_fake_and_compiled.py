"""``pooch profile --mode fake`` profiles and plans a step that no machine holds; ``pooch run --compile``."""

from __future__ import annotations

import pytest

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_inductor


def test_a_workload_larger_than_memory_is_profiled_and_planned(pooch: Pooch) -> None:
    size = "--set width=30000 --set depth=8 --set batch_size=1000000"
    result = pooch.ok(f"profile {pooch.small} --mode fake --roofline v100 -o big.json {size}")
    assert result.err == ""
    assert "v100 (roofline)" in result.out
    profile = Profile.load("big.json")
    assert (profile.mode, profile.link.name) == ("fake", "pcie3")
    assert profile.in_core_peak_bytes > 10**12
    assert pooch.ok("plan big.json --budget 80%").err == ""


def test_what_is_known_of_memory_is_one_line_of_the_table(pooch: Pooch) -> None:
    pooch.ok(f"profile {pooch.small} --mode fake -o here.json --json")
    (note,) = (one for one in Profile.load("here.json").notes if "take and give back inside" in one)
    assert "\n" not in note
    assert note.split(";")[0].split(":")[0][:40] in " ".join(pooch("show here.json").out.split())


def test_a_plan_with_a_roofline_s_times_runs_only_when_forced(pooch: Pooch) -> None:
    pooch.ok(f"profile {pooch.small} --mode fake --roofline v100 -o v100.json")
    pooch.ok("plan v100.json --budget 100% -o plan.json")
    run = f"run {pooch.small} --plan plan.json --steps 1 --timed 1"
    assert "or pass force=True (pooch run --force)" in pooch.refused(run)
    pooch.ok(run, "--force")


@needs_inductor
@pytest.mark.cpu_device
def test_a_compiled_run_makes_a_plan_keeps_it_and_is_bitwise_stock_inductor(pooch: Pooch) -> None:
    run = f"run {pooch.workloads}:boxed --compile --check --steps 2 --timed 1 --json"
    made = pooch.ok(run, "--budget 85% --save-plan compiled.plan.json --time-limit 2 --iterations 1")
    assert "Wrote compiled.plan.json" in made.err
    assert (made.data["fallbacks"], made.data["difference"]) == (0, None)
    assert made.data["measured_peak_bytes"] <= made.data["budget_bytes"]
    assert Plan.load("compiled.plan.json").workload == "boxed"
    assert pooch.ok(run, "--plan compiled.plan.json").data["difference"] is None
