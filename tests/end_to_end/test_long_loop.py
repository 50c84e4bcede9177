"""A long loop, with all that happens in one, is bitwise what it is without ``auto``, and never above its budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.long_loop import BATCH, CHECKPOINT_AT, SMALLER_BATCH, SMALLER_FROM, TURNS, WAITS
from tests.runtime.served import needs_compiler

ROOT = Path(__file__).parents[2]
BUDGET_BYTES = 15_000_000
"""Enough for what is studied while every value is swapped; two thirds of what the loop takes in-core."""

pytestmark = [needs_compiler, pytest.mark.cpu_device]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each mode of ``long_loop.py`` prints; the second half goes on from the first."""
    folder = tmp_path_factory.mktemp("long")
    beside = {"plain": _start("plain", folder), "first": _start("first", folder, BUDGET_BYTES)}
    found = {mode: _told(process) for mode, process in beside.items()}
    return found | {"second": _told(_start("second", folder, BUDGET_BYTES))}


def _start(mode: str, folder: Path, *budget: int) -> subprocess.Popen[str]:
    module = [sys.executable, "-W", "ignore", "-m", "tests.end_to_end.long_loop"]
    command = [*module, mode, str(folder), *map(str, budget)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return dict(json.loads(output.splitlines()[-1]))


def test_every_turn_is_bitwise_the_one_in_core(runs: dict[str, dict[str, Any]]) -> None:
    assert len(set(runs["plain"]["digests"])) > TURNS / 2  # it trains
    assert runs["first"]["digests"] + runs["second"]["digests"] == runs["plain"]["digests"]


def test_no_turn_takes_more_than_the_budget_with_the_arena_whole(runs: dict[str, dict[str, Any]]) -> None:
    assert max(runs["plain"]["peaks"]) > 1.5 * BUDGET_BYTES
    for mode in ("first", "second"):
        assert max(runs[mode]["peaks"]) <= BUDGET_BYTES, (mode, runs[mode]["peaks"])


def test_it_follows_plans_and_is_served_in_both_halves_whatever_comes(runs: dict[str, dict[str, Any]]) -> None:
    first, second = runs["first"], runs["second"]
    assert first["fallbacks"] == second["fallbacks"] == 0
    assert all(second["followed"])  # that of the first half is kept
    assert all(first["followed"][WAITS["first"][-1] :])
    smaller = SMALLER_FROM - CHECKPOINT_AT
    turn_bytes = {mode: _differences(runs[mode]["served"]) for mode in ("first", "second")}
    assert min(turn_bytes["first"][-3:]) > 0  # behind an exception in backward, before it one in forward
    whole, with_smaller = max(turn_bytes["first"]), turn_bytes["second"][smaller + 3 :]
    assert sum(size_bytes > 0.9 * whole * SMALLER_BATCH / BATCH for size_bytes in with_smaller) > len(with_smaller) / 2


def _differences(totals: list[int]) -> list[int]:
    return [now - before for before, now in zip([0, *totals], totals, strict=False)]
