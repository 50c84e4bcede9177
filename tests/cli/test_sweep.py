"""``pooch sweep``, end to end: the CSV, the table, the picture, and what is left when it does not end well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import poochplan
from poochplan.formats.plan import SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner import sweep as sweeping
from poochplan.planner.planning import smallest_budget
from poochplan.planner.sweep import CellStatus, SweepPoint, all_policies
from tests.cli.conftest import Pooch

COLUMNS = [
    "policy", "budget_bytes", "budget_share", "feasible", "peak_bytes", "step_s", "overhead", "stall_s", "replay_s",
    "out_bytes", "in_bytes", "bound_overhead", "gap", "wall_s", "status",
]  # fmt: skip
QUICK = "--policies swap-all,keep-all --processes 1"


def test_every_policy_in_one_command(pooch: Pooch, profile: poochplan.Profile) -> None:
    result = pooch.ok(f"sweep {pooch.profile} -o sweep.csv --png sweep.png --points 3")
    assert result.err == ""
    assert "Wrote sweep.csv\nWrote sweep.png" in result.out
    assert "ahead by" in result.out
    frame = pd.read_csv("sweep.csv")
    assert list(frame.columns) == COLUMNS
    assert tuple(frame["policy"].drop_duplicates()) == all_policies()
    assert len(frame) == 3 * len(all_policies())
    assert frame["feasible"].dtype == bool
    assert (frame["peak_bytes"] <= frame["budget_bytes"]).equals(frame["feasible"])
    assert frame["overhead"].notna().equals(frame["feasible"])
    assert frame["budget_bytes"].min() == smallest_budget(profile)
    assert frame["budget_share"].max() == 1
    assert frame[frame["policy"] == "ilp"]["feasible"].all()
    assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_what_the_csv_has(pooch: Pooch) -> None:
    result = pooch.ok(f"sweep {pooch.profile} -o s.csv --budgets 90%,1KiB,90% {QUICK} --json")
    data = result.data
    frame = pd.read_csv("s.csv")
    assert [point["peak_bytes"] for point in data["points"]] == list(frame["peak_bytes"])
    assert [point["feasible"] for point in data["points"]] == [False, True, False, False]
    assert data["points"][0]["overhead"] is None
    assert data["smallest_budget_bytes"] == smallest_budget(Profile.load(pooch.profile))
    assert "Wrote s.csv" in result.err


def test_the_machine_may_be_another(pooch: Pooch) -> None:
    smallest = smallest_budget(Profile.load(pooch.profile))
    machine = f"--link pcie3 --compute-scale 0.5 --device-memory {smallest + (3 << 20)} --margin 3MiB"
    data = pooch.json(f"sweep {pooch.profile} {QUICK} {machine} --points 2 --force")
    assert len(data["assumed"]) == 3
    assert {point["budget_bytes"] for point in data["points"]} == {smallest}
    assert Path(data["csv"]).name == "small.sweep.csv"
    Path(data["csv"]).unlink()


def test_where_no_policy_has_a_plan_the_code_is_3_and_the_peaks_are_written(pooch: Pooch) -> None:
    result = pooch(f"sweep {pooch.profile} -o sweep.csv --png sweep.png --budgets 1KiB {QUICK}")
    assert result.code == 3
    smallest = smallest_budget(Profile.load(pooch.profile))
    assert f"expected at least {smallest} bytes" in result.error
    assert list(pd.read_csv("sweep.csv")["feasible"]) == [False, False]


def altered(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes ``change`` of each point that the sweep finds."""
    solve = sweeping.solve_cell
    monkeypatch.setattr(sweeping, "solve_cell", lambda *arguments: change(solve(*arguments)))


@pytest.mark.parametrize(
    ("change", "told", "code", "message"),
    [
        ({"status": SolveStatus.TIME_LIMIT}, "time limit", 0, ""),
        ({"status": CellStatus.FAILED, "failure": "full"}, "failed: full", 1, "1 of 2 plans failed, first swap-all"),
    ],
)
def test_what_went_wrong_is_the_exit_code_and_the_rest_is_written(
    pooch: Pooch, monkeypatch: pytest.MonkeyPatch, change: Any, told: str, code: int, message: str
) -> None:
    altered(monkeypatch, lambda point: replace(point, **change) if point.policy == "swap-all" else point)
    result = pooch(f"sweep {pooch.profile} -o sweep.csv --budgets 100% {QUICK}")
    assert result.code == code
    assert message in result.err
    assert list(pd.read_csv("sweep.csv")["status"]) == [told, "fits"]


def test_interrupted_it_writes_what_is_finished(pooch: Pooch, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_second(point: SweepPoint) -> SweepPoint:
        if point.policy == "keep-all":
            raise KeyboardInterrupt
        return point

    altered(monkeypatch, interrupt_second)
    sweep = f"sweep {pooch.profile} -o sweep.csv --png sweep.png --budgets 100%"
    result = pooch(sweep, QUICK)
    assert (result.code, result.error) == (130, "interrupted")
    assert "Wrote sweep.csv: only the 1 rows that were finished" in result.out
    assert list(pd.read_csv("sweep.csv")["policy"]) == ["swap-all"]
    assert not Path("sweep.png").exists()
    assert "nothing was written" in pooch(sweep, "--policies keep-all --processes 1 --force").out
