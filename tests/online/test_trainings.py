"""Loops of many kinds under ``auto``: bitwise what they are without it, and within the budget."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

from tests.online.runs import TURNS, Run, run_auto, run_plain
from tests.online.trainings import TRAININGS

SHARES = {"checkpointing_inside": 0.8}
"""Of the in-core peak; 60% for the others."""
REFUSED = {
    "gan": ("a later part of the loop uses the saved tensors", "which layer judge"),
}
"""Why a part of the loop is not planned."""
COMES_LATE = {"evaluated_between"}
"""A kind of step that first comes when the others have their plans."""


@pytest.mark.parametrize("name", TRAININGS)
def test_a_loop_that_swaps_before_its_plan_is_bitwise_and_in_budget_from_the_first_step(
    name: str, tmp_path: Path
) -> None:
    expected, found, budget_bytes, said = _plain_and_auto(name, tmp_path, before_plan="swap", on_refusal="swap")
    assert found.equals(expected)
    assert found.peak_bytes <= budget_bytes
    _is_as_expected(name, found, said)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_loop_that_is_in_core_before_its_plan_is_bitwise_and_in_budget_from_there_on(
    name: str, tmp_path: Path
) -> None:
    expected, found, budget_bytes, said = _plain_and_auto(name, tmp_path)
    assert found.equals(expected)
    _is_as_expected(name, found, said)
    if name not in REFUSED and name not in COMES_LATE:
        assert max(found.peaks[found.all_planned_at :]) <= budget_bytes


def _plain_and_auto(name: str, folder: Path, **options: str) -> tuple[Run, Run, int, list[str]]:
    """Run as it is, and under ``auto``; the budget, and what was said."""
    gc.collect()
    turns = TURNS + 8 * (name == "lengths")  # each is profiled
    expected = run_plain(TRAININGS[name], turns)
    budget_bytes = int(expected.peak_bytes * SHARES.get(name, 0.6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        found = run_auto(TRAININGS[name], budget_bytes, folder, turns, **options)
    said = [str(one.message) for one in caught if "poochplan" in str(one.message)]
    return expected, found, budget_bytes, said


def _is_as_expected(name: str, found: Run, said: list[str]) -> None:
    assert found.session is not None
    assert found.planned_at is not None
    assert found.session.total.fallbacks == 0 or name in ("raising", "interrupted", "lengths")
    assert name in REFUSED or not [text for text in said if "budget" in text]
    assert name not in REFUSED or any(why in text for text in said for why in REFUSED[name])
