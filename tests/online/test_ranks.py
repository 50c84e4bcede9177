"""FSDP2 on several processes: bitwise what it is without a session, with one plan, and as much memory as predicted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from poochplan.units import parse_budget
from tests.depth import DEEP, todays
from tests.online.sharded import GIVEN_STEPS, SHARDED
from tests.online.test_sessions import within
from tests.online.unequal import FAILING
from tests.runtime.served import needs_compiler
from tests.torchrun import started, torchrun

UNIT_BYTES = 132_864
"""Gathered weights of one block: gloo's threads may hold the buffer of a collective a moment longer, and plans leave
room for that.
"""


IN_DEPTH = "not_resharded", "frozen", "resharded"
"""Tried with ``DEEP=1`` only, since each takes two processes some 14 s. ``loading`` reshards too."""


@needs_compiler
def test_two_ranks_are_bitwise_the_same_within_what_was_predicted(tmp_path: Path) -> None:
    kinds = todays([kind for kind in SHARDED if kind != "resharded_to_2" and (DEEP or kind not in IN_DEPTH)])
    check_ranks(torchrun("tests.online.sharded", tmp_path, *kinds), kinds)


@needs_compiler
@pytest.mark.deep  # torch reshards; two ranks have whole and sharded weights
def test_a_number_to_reshard_to_is_kept_on_four_ranks(tmp_path: Path) -> None:
    check_ranks(torchrun("tests.online.sharded", tmp_path, "resharded_to_2", ranks=4), ["resharded_to_2"])


@needs_compiler
@pytest.mark.parametrize("kinds", [["views", "accumulating_by_no_sync", "static"], ["unused"]])
def test_ddp_is_bitwise_the_same_within_the_budget_whatever_its_options(kinds: list[str], tmp_path: Path) -> None:
    check_ranks(torchrun("tests.online.sharded", tmp_path, *kinds), kinds, spare_bytes=0)


def check_ranks(ranks: list[dict[str, Any]], kinds: Sequence[str], spare_bytes: int = UNIT_BYTES) -> None:
    for kind in kinds:
        first, *others = (rank[kind]["planned"] for rank in ranks)
        for other in others:
            assert first["plans"] == other["plans"] != [], (kind, first["refused"])
            assert first["followed"] == other["followed"] > 0, kind
        for rank in ranks:
            check(kind, spare_bytes, **rank[kind])


def check(
    kind: str,
    spare_bytes: int,
    plain: dict[str, Any],
    planned: dict[str, Any],
    all_swap: dict[str, Any] | None = None,
    all_recompute: dict[str, Any] | None = None,
) -> None:
    for found in filter(None, (planned, all_swap, all_recompute)):
        assert is_as_plain(found, plain), kind
        assert found["fallbacks"] == [], kind
        predicted_bytes = found["predicted_bytes"]
        assert abs(found["peak_bytes"] - predicted_bytes) <= spare_bytes + 0.03 * predicted_bytes, kind
    assert planned["peak_bytes"] <= planned["budget_bytes"] < plain["peak_bytes"], kind
    assert abs(plain["peak_bytes"] - planned["in_core_bytes"]) <= spare_bytes + 0.03 * plain["peak_bytes"], kind
    assert all_swap is None or all_swap["swapped_bytes"] > 0, kind
    assert all_recompute is None or all_recompute["replayed"] > 0, kind


def is_as_plain(found: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Whether losses and parameters have the same bits in each step that was taken."""
    losses, parameters = (plain[name][: len(found[name])] for name in ("losses", "parameters"))
    return len(parameters) >= GIVEN_STEPS and (losses, parameters) == (found["losses"], found["parameters"])


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks that differ have found and told, by how they differ."""
    kinds = "budgets", "later", "applied", "wrapped", "joined", "apart", "idle", "shapes"
    return torchrun("tests.online.unequal", tmp_path_factory.mktemp("unequal"), *kinds)


@pytest.mark.parametrize(
    ("kind", "least"), [("budgets", (1, 1)), ("later", (1, 1)), ("joined", (1, 0)), ("apart", (0, 1))]
)
def test_ranks_that_differ_train_on_as_without_a_session_and_wait_for_no_plan_of_another(
    kind: str, least: tuple[int, int], unequal: list[dict[str, Any]]
) -> None:
    for rank, followed in zip(unequal, least, strict=True):
        plain, planned = rank[kind]["plain"], rank[kind]["planned"]
        assert {name: planned[name] for name in plain} == plain
        assert planned.get("followed", 0) >= followed


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_on_which_something_of_ours_fails_keeps_no_other_waiting(where: int, tmp_path: Path) -> None:
    kinds = [f"failing-{where}-{name}" for name in FAILING if where == 0 or name != "study"]
    ranks = torchrun("tests.online.unequal", tmp_path, *kinds)
    for kind in kinds:
        for rank, found in enumerate(one[kind] for one in ranks):
            assert (found["is_same"], found["error"]) == (True, ""), kind
            assert found["reached"] is (rank == where), kind
            assert len(found["said"]) == 1, (kind, rank, found["said"])
            (line,) = found["said"]
            assert "the session stands aside" in line


def test_the_budget_is_the_smallest_of_all_ranks(unequal: list[dict[str, Any]]) -> None:
    for planned in (rank["budgets"]["planned"] for rank in unequal):
        assert planned["budget_bytes"] == parse_budget("75%", planned["in_core_bytes"])
        assert planned["ranks"] == 2, "they share the host's link and memory"


def test_a_rank_with_larger_shapes_later_leaves_the_plan_that_the_others_follow(unequal: list[dict[str, Any]]) -> None:
    first, second = (rank["later"]["planned"]["followed"] for rank in unequal)
    assert first > second


def test_a_rank_with_larger_shapes_from_the_start_is_one_error_on_all_before_they_follow_a_plan(
    unequal: list[dict[str, Any]],
) -> None:
    first, second = (rank["shapes"]["told"] for rank in unequal)
    assert first == second
    assert first == [
        "UsageError: steps: expected the same ones on all ranks, with 0 float32[256, 64] as on rank 0, found "
        "0 float32[320, 64] on rank 1; give all ranks the same, or rank 0 the largest inputs, or train without a "
        "session"
    ]


def test_a_wrapper_from_before_the_session_is_within_the_budget_when_it_makes_other_buckets(
    unequal: list[dict[str, Any]],
) -> None:
    assert [rank["wrapped"]["told"] for rank in unequal] == [[], []]


def test_ranks_that_differ_under_a_given_plan_all_tell_the_same_line(unequal: list[dict[str, Any]]) -> None:
    first, second = (rank["applied"] for rank in unequal)
    assert first == second
    assert first["alike"] == []
    for policy, start in (("warn", "poochplan: "), ("error", "DivergenceError: ")):
        (line,) = first[policy]
        assert line.startswith(f"{start}rank 1: the step diverged from the plan")
    (line,) = first["plans"]
    assert line.startswith("UsageError: plan: expected the same one on all ranks")


def test_the_others_do_not_wait_for_a_rank_without_a_batch(unequal: list[dict[str, Any]]) -> None:
    first, (line,) = (rank["idle"]["told"] for rank in unequal)
    assert first == []
    assert "was not called with gradients inside the session" in line


@needs_compiler
@pytest.mark.parametrize("layout", [pytest.param("whole", marks=pytest.mark.deep), "sequence"])
def test_tensor_parallel_ranks_are_bitwise_the_same_within_the_budget(layout: str, tmp_path: Path) -> None:
    ranks = torchrun("tests.online.tensor_parallel", tmp_path, layout)
    for rank in ranks:
        plain, planned, applied = (rank[name] for name in ("plain", "planned", "applied"))
        for found in (planned, applied, rank["all swap"], rank["all recompute"]):
            assert is_as_plain(found, plain)
            assert found["followed"] > 0
        for found in (planned, applied):
            assert found["peak_bytes"] <= planned["budget_bytes"] < plain["peak_bytes"]
            assert found["dtensors"].get("swap", 0) + found["dtensors"].get("recompute", 0) > 0
        assert rank["all swap"]["dtensors"]["swap"] >= rank["all swap"]["followed"], "some in each step"
        assert rank["all recompute"]["dtensors"]["recompute"] > 0
        assert all(rank[name]["fallbacks"] == [] for name in ("applied", "all swap", "all recompute"))
    if layout == "whole":
        assert ranks[0]["plain"]["losses"] == ranks[1]["plain"]["losses"]


def test_a_rank_that_is_killed_ends_the_others_and_leaves_nothing_behind(tmp_path: Path, on_disk: Path) -> None:
    folder, files, spilled = tmp_path / "ranks", tmp_path / "files", on_disk / "spilled"
    for one in (folder, files, spilled):
        one.mkdir()
    mark = f"ranks-{tmp_path.name}-{os.getpid()}"
    variables = {"TMPDIR": str(files), "POOCH_SPILL_DIR": str(spilled), "POOCH_TEST_MARK": mark}
    done = started("tests.online.unequal", str(folder), "killed", **variables)
    assert done.returncode != 0
    assert (files / "planning").exists()
    assert not list(folder.glob("rank*.json")), "no rank trained to the end"
    assert within(30, lambda: not processes_with(mark))
    assert [*files.glob("poochplan*"), *spilled.iterdir()] == []


def processes_with(mark: str) -> list[str]:
    """Processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
