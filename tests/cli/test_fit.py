"""``pooch fit``, end to end: the value, the ladder, its files, and a real run on this machine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.profiler import link as links
from tests.cli.conftest import Pooch

SIMULATED = "--roofline 50e12,2e12 --margin 0 --evaluations 300"
COLUMNS = [
    "batch_size", "in_core_peak_bytes", "smallest_peak_bytes", "fits", "in_core_step_s", "step_s", "overhead",
    "bound_overhead", "samples_per_s", "is_measured",
]  # fmt: skip


def test_the_value_fits_the_next_one_does_not_and_the_ladder_leads_from_in_core_to_it(pooch: Pooch) -> None:
    files = "-o big.plan.json --csv fit.csv --picture fit.png"
    result = pooch.ok(f"fit {pooch.small} --vary batch_size --device-memory 2MiB {SIMULATED} {files} --json")
    data, err = result.data, result.err
    largest, following, in_core = data["rungs"][-1], data["following"], data["in_core_value"]
    assert (largest["value"], following["value"]) == (data["value"], data["value"] + 1)
    assert largest["smallest_peak_bytes"] <= data["budget_bytes"] == 2 << 20 < following["smallest_peak_bytes"]
    assert in_core < data["value"]
    assert (data["trial"], data["parameters"]) == (None, {"width": 64, "depth": 4})
    assert data["inputs"] == [f"0 float32[{data['value']}, 64]"]
    assert err.splitlines()[0].startswith("small with width 64, depth 4: batch_size within 2.00 MiB")
    assert "is the largest that trains within 2.00 MiB" in err
    assert [file for file in ("big.profile.json", *files.split()[1::2]) if f"Wrote {file}" not in err] == []
    made, profile = Plan.load("big.plan.json"), Profile.load("big.profile.json")
    assert made.profile_fingerprint == profile.ops_fingerprint
    assert smallest_budget(profile) <= made.budget_bytes == 2 << 20
    assert Path("fit.png").read_bytes().startswith(b"\x89PNG")
    frame = pd.read_csv("fit.csv")
    assert list(frame.columns) == COLUMNS
    assert list(frame["batch_size"]) == [*(rung["value"] for rung in data["rungs"]), data["value"] + 1]
    assert list(frame["fits"]) == [True] * len(data["rungs"]) + [False]

    rungs = {rung["value"]: rung for rung in data["rungs"]}
    powers = [1 << exponent for exponent in range(20) if in_core < 1 << exponent < data["value"]]
    assert sorted(rungs) == [in_core, *powers, data["value"]]
    assert rungs[in_core]["in_core_peak_bytes"] <= data["budget_bytes"]
    assert rungs[in_core]["overhead"] == 0
    for value, rung in rungs.items():
        assert rung["overhead"] >= (rung["bound_overhead"] or 0) - 1e-9
        assert rung["items_per_s"] == pytest.approx(value / rung["step_s"])
    assert rungs[data["best"]]["items_per_s"] == max(rung["items_per_s"] for rung in data["rungs"])


def test_a_range_that_ends_before_the_memory_does_is_no_largest_value(pooch: Pooch) -> None:
    out = pooch.ok(f"fit {pooch.small} --vary depth --device-memory 1GiB {SIMULATED} --to 4").out
    assert "depth 4 is the largest tried that trains within 1.00 GiB, with everything kept" in out
    assert "the range ends at 4: larger ones were not tried, and may fit too" in out


def test_less_overhead_is_a_smaller_value(pooch: Pooch) -> None:
    slow = f"{SIMULATED} --link 100MB/s --max-overhead 0%"
    held = pooch.json(f"fit {pooch.small} --vary batch_size --device-memory 2MiB {slow}")
    assert held["in_core_value"] <= held["value"]
    assert held["rungs"][-1]["overhead"] <= 0
    assert not held["following"]["fits"]
    assert held["following"]["smallest_peak_bytes"] <= held["budget_bytes"], "without that limit it fits"


def test_a_function_serves_in_python() -> None:
    def workload(width: int) -> poochplan.Workload:
        import torch

        if width % 8:
            raise ValueError("width: expected a multiple of 8")
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        inputs = torch.randn(64, width)
        return poochplan.Workload(model, lambda: model(inputs).sum(), torch.optim.SGD(model.parameters(), lr=0.1))

    found = poochplan.fit(workload, "width", "1MiB", roofline="v100", low=8, high=1024, evaluations=100)
    assert found.value % 8 == 0
    assert found.following is not None
    assert found.following.value == found.value + 8
    assert found.following.smallest_peak_bytes > 1 << 20 >= found.rungs[-1].smallest_peak_bytes
    assert found.best is None  # networks of other widths are not the same work


def test_here_the_value_runs_bitwise_within_the_limit_and_the_next_is_refused(
    pooch: Pooch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CURVE_SIZES_BYTES", (64 << 10, 256 << 10))  # the largest copy would be a GiB
    wide, limit = "--set width=128 --set depth=1", 2 << 20
    data = pooch.json(f"fit {pooch.small} --vary batch_size --evaluations 200 {wide} --device-memory 2MiB -o plan.json")
    assert Path("profile.json").exists()
    trial, value = data["trial"], data["value"]
    assert (trial["value"], trial["is_within"], trial["is_bitwise"]) == (value, True, True)
    assert trial["peak_bytes"] <= limit == data["budget_bytes"]
    assert all(rung["is_measured"] for rung in (*data["rungs"], data["following"]))
    assert data["following"]["value"] == value + 1
    pooch.ok(f"run {pooch.small} --plan plan.json {wide} --set batch_size={value} --check --json")
    pooch.ok(f"profile {pooch.small} {wide} --set batch_size={value + 1} -o next.json --iterations 1")
    error = pooch.refused(f"plan next.json --budget {limit} -o next.plan.json", code=3)
    assert "no plan fits a budget of" in error
