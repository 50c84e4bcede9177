"""The comparison over an epoch: losses to the bit within the budget, and the page shows what the results file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.against.compared_networks import RECURRENT
from benchmarks.against.compared_networks import TINY_RECURRENT as TINY
from benchmarks.against.rows import Effort
from benchmarks.char_rnn import ALL, GAP, LINKS, OURS, SHARES, joined, measured, measured_lines, simulated_lines, tables
from tests.runtime.served import needs_compiler

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "char_rnn.json"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


@needs_compiler
@pytest.mark.cpu_device
def test_a_small_network_trains_an_epoch_within_the_budget_with_the_losses_of_in_core(tmp_path: Path) -> None:
    effort = Effort(pairs=1, threads=1, time_limit_s=1.0, folder=str(tmp_path), throttle="400MB/s")
    found = measured("tiny-steps", "50%", effort, lambda _: None)
    assert found["throttle"] == "400MB/s"
    assert [row["policy"] for row in found["rows"]] == list(TINY["tiny-steps"].policies)
    assert found["in_core"]["peak_bytes"] > found["budget_bytes"]
    assert len(set(found["in_core"]["losses"])) == TINY["tiny-steps"].curve_steps
    for row in found["rows"]:
        assert row["curve"]["losses_equal"]
        assert row["curve"]["end_equal"]
        assert row["curve"]["fallbacks"] == 0
        assert row["curve"]["peak_bytes"] <= found["budget_bytes"]
        assert row["time"]["pairs"] == 1
    assert len(measured_lines(found)) == len(found["rows"])


def test_a_curve_that_differs_is_told_and_a_policy_that_does_not_fit_too() -> None:
    row = {
        "policy": OURS,
        "epoch_s": {"in_core": 1.0, "planned": 1.1},
        "time": {"wall": {"median_ratio": 1.1, "interval_95": [1.0, 1.2]}, "cpu": {"median_ratio": 1.3}},
        "allocator": "arena",
        "predicted_ratio": 1.05,
        "curve": {"peak_bytes": 1 << 20, "losses_equal": False, "end_equal": True, "steps": 3},
    }
    network: dict[str, Any] = {
        "network": "n",
        "budget_bytes": 3 << 20,
        "in_core": {"peak_bytes": 2 << 20},
        "rows": [row, {"policy": "vdnn", "refused": "why"}],
    }
    differs, refused = measured_lines(network)
    assert differs == (
        "| n | ours (`ilp`), from an arena | 1.0, 1.1 | **+10.0%** [+0.0%, +20.0%] | +30.0% | +5.0% | 1.0, 3.0, 2.0 "
        "| **differ** |"
    )
    assert refused == "| n | vdnn | | why | | | | |"
    assert tables({"measured": [], "simulated": []}) == ""


def test_what_is_taken_anew_replaces_its_network_and_nothing_else() -> None:
    known = {"measured": [{"network": "seq2seq-steps", "run": 1}, {"network": "char-rnn-small", "run": 1}]}
    found = joined(known, {"measured": [{"network": "seq2seq-steps", "run": 2}], "simulated": []})
    assert [(one["network"], one["run"]) for one in found["measured"]] == [("char-rnn-small", 1), ("seq2seq-steps", 2)]
    assert found["simulated"] == []


def test_every_network_is_compared_with_swap_all_and_ours_and_is_there_to_be_asked_for() -> None:
    assert all({"swap-all", OURS} <= {*one.policies} for one in RECURRENT.values())
    assert "earliest-first" in RECURRENT["char-rnn-small"].policies
    assert "seq2seq" in RECURRENT["seq2seq-steps"].policies
    assert {one.config for one in ALL.values()} == {"char_rnn", "seq2seq_steps"}


def test_the_page_shows_the_committed_results(results: dict[str, Any]) -> None:
    page = (ROOT / "benchmarks" / "pages" / "papers.md").read_text(encoding="utf-8")
    measured_ones = [line for network in results["measured"] for line in measured_lines(network)]
    simulated_ones = [line for network in results["simulated"] for line in simulated_lines(network)]
    assert len(measured_ones) == sum(len(network.policies) for network in RECURRENT.values())
    assert len(simulated_ones) == len(LINKS) * len(SHARES) * len(results["simulated"])
    assert [line for line in (*measured_ones, *simulated_ones) if line not in page] == []


def test_all_committed_epochs_are_equal_to_the_bit_and_within_their_budget(results: dict[str, Any]) -> None:
    for network in results["measured"]:
        for row in network["rows"]:
            assert row["curve"]["losses_equal"]
            assert row["curve"]["end_equal"]
            assert row["gradients"] == row["parameters"] == "equal"
            assert row["curve"]["peak_bytes"] <= network["budget_bytes"]


def test_no_committed_policy_is_ahead_of_ours_by_more_than_the_gap_or_below_the_bound(results: dict[str, Any]) -> None:
    for network in results["simulated"]:
        for row in network["rows"]:
            steps = {name: 1 + value for name, value in row["overheads"].items() if value is not None}
            bound, ours = steps.pop("bound"), steps[OURS]
            assert bound <= ours * (1 + 1e-9)
            assert all(ours <= one * (1 + GAP) for one in steps.values())
