"""``pooch profile --mode fake`` profiles and plans a step that no machine holds; wrong requests are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poochplan.formats.profile import Profile

Pooch = Any


def test_a_workload_larger_than_memory_is_profiled_and_planned(pooch: Pooch, workloads: Path, tmp_path: Path) -> None:
    result = pooch(
        "profile", f"{workloads}:small", "--mode", "fake", "--roofline", "v100", "-o", "big.json",
        "--set", "width=30000", "--set", "depth=8", "--set", "batch_size=1000000",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    assert "v100 (roofline)" in result.out
    profile = Profile.load(tmp_path / "big.json")
    assert (profile.mode, profile.link.name) == ("fake", "pcie3")
    assert profile.in_core_peak_bytes > 10**12
    result = pooch("plan", "big.json", "--budget", "80%")
    assert (result.code, result.err) == (0, "")


def test_what_is_known_of_memory_is_one_line_of_the_table(pooch: Pooch, workloads: Path, tmp_path: Path) -> None:
    result = pooch("profile", f"{workloads}:small", "--mode", "fake", "-o", "here.json", "--json")
    assert result.code == 0
    (note,) = (one for one in Profile.load(tmp_path / "here.json").notes if "take and give back inside" in one)
    assert "\n" not in note
    shown = " ".join(pooch("show", "here.json").out.split())
    assert note.split(";")[0].split(":")[0][:40] in shown


def test_a_plan_with_a_roofline_s_times_runs_only_when_forced(pooch: Pooch, workloads: Path) -> None:
    pooch("profile", f"{workloads}:small", "--mode", "fake", "--roofline", "v100", "-o", "v100.json")
    pooch("plan", "v100.json", "--budget", "100%", "-o", "plan.json")
    refused = pooch("run", f"{workloads}:small", "--plan", "plan.json", "--steps", "1", "--timed", "1")
    assert refused.code == 2
    assert "or pass force=True (pooch run --force)" in refused.error
    assert (
        pooch("run", f"{workloads}:small", "--plan", "plan.json", "--steps", "1", "--timed", "1", "--force").code == 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mode", "run", "--roofline", "v100"],
            "--roofline: mode run measures durations; drop it, or add --mode fake",
        ),
        (["--mode", "swap-all", "--roofline", "v100"], "--roofline: mode swap-all measures durations; drop it"),
        (["--mode", "fake", "--iterations", "7"], "--iterations: mode fake times no steps; drop --iterations"),
        (["--roofline", "v100", "--iterations", "7"], "--iterations: mode fake times no steps; drop --iterations"),
        (["--mode", "fake", "--roofline", "v100", "--throttle", "1GB/s"], "--throttle: a roofline moves no bytes"),
    ],
)
def test_a_wrong_mode_or_roofline_ends_with_code_2(
    pooch: Pooch, workloads: Path, arguments: list[str], message: str
) -> None:
    result = pooch("profile", f"{workloads}:small", *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
