"""Planning for another machine from the command line."""

from __future__ import annotations

from pathlib import Path

import poochplan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from tests.cli.conftest import Pooch


def test_the_budget_is_the_device_memory_less_the_margin(pooch: Pooch, profile_path: Path) -> None:
    profile = Profile.load(profile_path)
    budget_bytes = (smallest_budget(profile) + profile.in_core_peak_bytes) // 2
    memory = f"--device-memory {budget_bytes + (1 << 20)} --margin 1MiB"
    plan = f"plan {profile_path} --evaluations 50"
    assert pooch.json(f"{plan} -o plan.json {memory}")["budget_bytes"] == budget_bytes
    pooch.ok(f"{plan} -o all.json --device-memory {512 * 2**20 + budget_bytes}")
    assert poochplan.Plan.load("all.json").budget_bytes == budget_bytes


def test_a_plan_for_another_machine_says_so_and_run_warns(pooch: Pooch, profile_path: Path, small: str) -> None:
    out = pooch.ok(f"plan {profile_path} -o plan.json --budget 85% --link 12GB/s --compute-scale 0.5").out
    assert "compute takes 0.5 times as long as measured" in out
    assert "link 12 GB/s each way, instead of spill" in out
    assert poochplan.Plan.load("plan.json").estimate
    run = f"run {small} --plan plan.json"
    warned = pooch.ok(run, "--steps 1 --timed 1").err
    assert "pooch: warning: poochplan: this plan is for another machine" in warned
    error = pooch.refused(run, "--timeline run.png --profile", profile_path)
    assert "--timeline: expected a plan for this machine" in error


def test_a_plan_for_ranks_of_one_host_records_their_shares_and_show_tells_them(
    pooch: Pooch, profile_path: Path
) -> None:
    options = "--evaluations 50 --budget 85% --ranks-per-host 4 --host-budget 1TiB --timeline plan.png"
    result = pooch.ok(f"plan {profile_path} -o plan.json {options}")
    made, link = poochplan.Plan.load("plan.json"), Profile.load(profile_path).link
    assert made.link.ranks == 4
    assert made.link.inward.bandwidth_bytes_per_s == link.inward.bandwidth_bytes_per_s / 4
    assert (made.estimate, made.assumed) == (False, ())
    for shown in (result.out, pooch("show plan.json").out):
        text = " ".join(shown.split())
        assert "each of 4 ranks of a host has its share of the link" in text
        assert "each of 4 ranks of a host swaps at most 256 GiB, its share of the host budget" in text
