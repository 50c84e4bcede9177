"""Loops of many kinds under ``auto``: bitwise what they are without it, and within the budget."""

from __future__ import annotations

import functools
import gc
import warnings
from pathlib import Path

import pytest

from poochplan.online.before_plan import Mode
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


@functools.lru_cache(maxsize=1)
def plain(name: str) -> Run:
    """The loop as it is; of some, each of several lengths is profiled."""
    return run_plain(TRAININGS[name], TURNS + 8 * (name == "lengths"))


@pytest.mark.parametrize("before_plan", ["swap", "in-core"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_loop_is_bitwise_and_in_budget_from_the_first_step_if_it_swaps_before_its_plan_else_from_there_on(
    name: str, before_plan: Mode, tmp_path: Path
) -> None:
    gc.collect()
    expected = plain(name)
    budget_bytes = int(expected.peak_bytes * SHARES.get(name, 0.6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        options = {"before_plan": before_plan, "on_refusal": before_plan}
        found = run_auto(TRAININGS[name], budget_bytes, tmp_path, len(expected.losses), **options)
    said = [str(one.message) for one in caught if "poochplan" in str(one.message)]
    assert found.equals(expected)
    if before_plan == "swap":
        assert found.peak_bytes <= budget_bytes
    elif name not in REFUSED and name not in COMES_LATE:
        assert max(found.peaks[found.all_planned_at :]) <= budget_bytes
    assert found.planned_at is not None
    assert found.session.total.fallbacks == 0 or name in ("raising", "interrupted", "lengths")
    assert name in REFUSED or not [text for text in said if "budget" in text]
    assert name not in REFUSED or any(why in text for text in said for why in REFUSED[name])
