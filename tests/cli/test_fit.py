"""``pooch fit``, end to end: the value, the ladder, its files, errors in one line, and a real run on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget

Pooch = Any
SIMULATED = ("--roofline", "50e12,2e12", "--margin", "0", "--evaluations", "300")
COLUMNS = [
    "batch_size", "in_core_peak_bytes", "smallest_peak_bytes", "fits", "in_core_step_s", "step_s", "overhead",
    "bound_overhead", "samples_per_s", "is_measured",
]  # fmt: skip


def test_the_value_fits_and_the_next_one_does_not(pooch: Pooch, workloads: Path) -> None:
    result = pooch(
        "fit", f"{workloads}:small", "--vary", "batch_size", "--device-memory", "2MiB", *SIMULATED,
        "-o", "big.plan.json", "--csv", "fit.csv", "--picture", "fit.png", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    data = json.loads(result.out)
    largest, following = data["rungs"][-1], data["following"]
    assert (largest["value"], following["value"]) == (data["value"], data["value"] + 1)
    assert largest["smallest_peak_bytes"] <= data["budget_bytes"] == 2 << 20 < following["smallest_peak_bytes"]
    assert data["in_core_value"] < data["value"]
    assert data["trial"] is None
    assert data["parameters"] == {"width": 64, "depth": 4}
    assert data["inputs"] == [f"0 float32[{data['value']}, 64]"]
    assert result.err.splitlines()[0].startswith("small with width 64, depth 4: batch_size within 2.00 MiB")
    assert Path("fit.png").read_bytes().startswith(b"\x89PNG")
    frame = pd.read_csv("fit.csv")
    assert list(frame.columns) == COLUMNS
    assert list(frame["batch_size"]) == [*(rung["value"] for rung in data["rungs"]), data["value"] + 1]
    assert list(frame["fits"]) == [True] * len(data["rungs"]) + [False]
    for name in ("Wrote big.profile.json", "Wrote big.plan.json", "Wrote fit.csv", "Wrote fit.png"):
        assert name in result.err


def test_the_ladder_goes_from_in_core_over_powers_of_two_to_the_largest(pooch: Pooch, workloads: Path) -> None:
    result = pooch(
        "fit", f"{workloads}:small", "--vary", "batch_size", "--device-memory", "2MiB", *SIMULATED, "--json"
    )  # fmt: skip
    data = json.loads(result.out)
    in_core, rungs = data["in_core_value"], {rung["value"]: rung for rung in data["rungs"]}
    powers = [1 << exponent for exponent in range(20) if in_core < 1 << exponent < data["value"]]
    assert sorted(rungs) == [in_core, *powers, data["value"]]
    assert rungs[in_core]["in_core_peak_bytes"] <= data["budget_bytes"]
    assert rungs[in_core]["overhead"] == 0
    for value, rung in rungs.items():
        assert rung["overhead"] >= (rung["bound_overhead"] or 0) - 1e-9
        assert rung["items_per_s"] == pytest.approx(value / rung["step_s"])
    assert rungs[data["best"]]["items_per_s"] == max(rung["items_per_s"] for rung in data["rungs"])


def test_the_plan_that_is_written_is_that_of_the_value(pooch: Pooch, workloads: Path) -> None:
    result = pooch(
        "fit", f"{workloads}:small", "--vary", "depth", "--device-memory", "2MiB", *SIMULATED, "-o", "plan.json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "is the largest that trains within 2.00 MiB" in result.out
    made, profile = Plan.load("plan.json"), Profile.load("profile.json")
    assert made.budget_bytes == 2 << 20
    assert made.profile_fingerprint == profile.ops_fingerprint
    assert smallest_budget(profile) <= made.budget_bytes


def test_a_range_that_ends_before_the_memory_does_is_no_largest_value(pooch: Pooch, workloads: Path) -> None:
    arguments = ("--vary", "depth", "--device-memory", "1GiB", *SIMULATED, "--to", 4)
    result = pooch("fit", f"{workloads}:small", *arguments)
    assert result.code == 0, result.err
    assert "depth 4 is the largest tried that trains within 1.00 GiB, with everything kept" in result.out
    assert "the range ends at 4: larger ones were not tried, and may fit too" in result.out


def test_less_overhead_is_a_smaller_value(pooch: Pooch, workloads: Path) -> None:
    arguments = ("fit", f"{workloads}:small", "--vary", "batch_size", "--device-memory", "2MiB", *SIMULATED, "--json",
                 "--link", "100MB/s")  # fmt: skip
    free, held = (json.loads(pooch(*arguments, "--max-overhead", share).out) for share in ("100000%", "0%"))
    assert held["in_core_value"] <= held["value"] < free["value"]
    assert held["rungs"][-1]["overhead"] <= 0
    assert not held["following"]["fits"]


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


def test_here_the_value_runs_bitwise_within_the_limit_and_the_next_is_refused(pooch: Pooch, workloads: Path) -> None:
    arguments = ("fit", f"{workloads}:small", "--vary", "batch_size", "--evaluations", "200", "--json")
    wide = ("--set", "width=128", "--set", "depth=1")
    result = pooch(*arguments, *wide, "--device-memory", "2MiB", "-o", "plan.json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    trial, limit = data["trial"], 2 << 20
    assert (trial["value"], trial["is_within"], trial["is_bitwise"]) == (data["value"], True, True)
    assert trial["peak_bytes"] <= limit == data["budget_bytes"]
    assert all(rung["is_measured"] for rung in (*data["rungs"], data["following"]))
    assert data["following"]["value"] == data["value"] + 1

    setting = f"batch_size={data['value']}"
    ran = pooch("run", f"{workloads}:small", "--plan", "plan.json", *wide, "--set", setting, "--check", "--json")
    assert ran.code == 0, ran.err
    setting = f"batch_size={data['value'] + 1}"
    profiled = ("profile", f"{workloads}:small", *wide, "--set", setting, "-o", "next.json", "--iterations", "1")
    assert pooch(*profiled).code == 0
    refused = pooch("plan", "next.json", "--budget", limit, "-o", "next.plan.json")
    assert refused.code == 3
    assert "no plan fits a budget of" in refused.error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--vary", "batchsize"], 2, "unknown parameter 'batchsize'; did you mean batch_size?; it takes width, depth"),
        (["--vary", "batch_size", "--set", "batch_size=4"], 2, "expected it to be varied alone, found it set to 4"),
        (["--vary", "batch_size", "--device-memory", "64KiB"], 3, "the smallest possible peak of batch_size 2"),
        (["--vary", "batch_size", "--max-overhead", "30"], 2, "expected a share such as 30% or 0.3, found '30'"),
        (["--vary", "batch_size", "--from", "9", "--to", "8"], 2, "expected values from 1 up, found 9 to 8"),
        (["--vary", "batch_size", "--roofline", "v1000"], 2, "roofline: expected v100, a100, h100, h200"),
        (["--vary", "batch_size", "-o", "plan.txt"], 2, "expected a file name that ends in .json"),
    ],
)
def test_bad_input_is_one_line(pooch: Pooch, workloads: Path, options: list[str], code: int, message: str) -> None:
    given = ["--device-memory", "1MiB", *SIMULATED, *options]
    result = pooch("fit", f"{workloads}:small", *given)
    assert result.code == code
    assert message in result.error


def test_a_parameter_that_is_no_whole_number_names_those_that_are(pooch: Pooch) -> None:
    result = pooch("fit", "char_rnn", "--vary", "lr", "--device-memory", "1GiB", *SIMULATED)
    assert result.code == 2
    assert "lr: expected a parameter that is a whole number, found 0.002 of type float" in result.error
    assert "those of char_rnn are: batch_size, sequence_length, width, layers, chunks, seed" in result.error


def test_without_a_memory_it_asks_for_one(pooch: Pooch, workloads: Path) -> None:
    result = pooch("fit", f"{workloads}:small", "--vary", "batch_size")
    assert (result.code, result.error) == (2, "device memory: expected a size such as 16GiB, found none; name it")
