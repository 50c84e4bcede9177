"""Planning for another machine from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import poochplan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget

Pooch = Any


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--budget", "60%", "--link", "0GB/s"], 2, "a rate above 0 such as 12GB/s"),
        (["--budget", "60%", "--link=-1GB/s"], 2, "found '-1GB/s'"),
        (["--budget", "60%", "--compute-scale", "0"], 2, "--compute-scale: expected a number above 0, found '0'"),
        (["--budget", "60%", "--margin", "1GiB"], 2, "--margin: expected --device-memory beside it"),
        (["--device-memory", "lots"], 2, "--device-memory: expected bytes such as 8GiB"),
        (["--device-memory", "512MiB"], 2, "expected more than the margin of 512 MiB"),
        (["--device-memory", "1GiB", "--margin", "some"], 2, "--margin: expected bytes such as 8GiB"),
        (["--device-memory", "1GiB", "--budget", "600MiB"], 2, "--budget: expected at most 536870912 bytes"),
        (["--device-memory", "4KiB", "--margin", "0"], 3, "device memory: expected more than the"),
    ],
)
def test_bad_input_is_one_line(pooch: Pooch, profile_path: Path, options: list[str], code: int, message: str) -> None:
    result = pooch("plan", profile_path, "-o", "plan.json", *options)
    assert result.code == code
    assert message in result.error
    assert not Path("plan.json").exists()


def test_the_budget_is_the_device_memory_less_the_margin(pooch: Pooch, profile_path: Path) -> None:
    profile = Profile.load(profile_path)
    budget_bytes = (smallest_budget(profile) + profile.in_core_peak_bytes) // 2
    memory = budget_bytes + (1 << 20)
    result = pooch("plan", profile_path, "-o", "plan.json", "--json", "--device-memory", memory, "--margin", "1MiB")
    assert json.loads(result.out)["budget_bytes"] == budget_bytes
    assert pooch("plan", profile_path, "-o", "all.json", "--device-memory", 512 * 2**20 + budget_bytes).code == 0
    assert poochplan.Plan.load("all.json").budget_bytes == budget_bytes


def test_a_plan_for_another_machine_says_so_and_run_warns(pooch: Pooch, profile_path: Path, workloads: Path) -> None:
    result = pooch(
        "plan", profile_path, "-o", "plan.json", "--budget", "85%", "--link", "12GB/s", "--compute-scale", "0.5"
    )
    assert result.code == 0
    assert "compute takes 0.5 times as long as measured" in result.out
    assert "link 12 GB/s each way, instead of spill" in result.out
    assert poochplan.Plan.load("plan.json").estimate
    result = pooch("run", f"{workloads}:small", "--plan", "plan.json", "--steps", "1", "--timed", "1")
    assert result.code == 0
    assert "pooch: warning: poochplan: this plan is for another machine" in result.err
    result = pooch(
        "run", f"{workloads}:small", "--plan", "plan.json", "--timeline", "run.png", "--profile", profile_path
    )
    assert result.code == 2
    assert "--timeline: expected a plan for this machine" in result.error


def test_a_plan_for_ranks_of_one_host_records_their_shares_and_show_tells_them(
    pooch: Pooch, profile_path: Path
) -> None:
    options = "--budget", "85%", "--ranks-per-host", "4", "--host-budget", "1TiB", "--timeline", "plan.png"
    result = pooch("plan", profile_path, "-o", "plan.json", *options)
    assert result.code == 0
    made, link = poochplan.Plan.load("plan.json"), Profile.load(profile_path).link
    assert made.link.ranks == 4
    assert made.link.inward.bandwidth_bytes_per_s == link.inward.bandwidth_bytes_per_s / 4
    assert (made.estimate, made.assumed) == (False, ())
    for shown in (result.out, pooch("show", "plan.json").out):
        text = " ".join(shown.split())
        assert "each of 4 ranks of a host has its share of the link" in text
        assert "each of 4 ranks of a host swaps at most 256 GiB, its share of the host budget" in text
    result = pooch("plan", profile_path, "-o", "other.json", "--budget", "85%", "--ranks-per-host", "0")
    assert (result.code, "--ranks-per-host: expected a whole number of at least 1, found '0'" in result.error) == (
        2,
        True,
    )
