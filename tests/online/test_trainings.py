"""Loops of many kinds under ``auto``: bitwise what they are without it, and within the budget from the first step."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

from tests.online.runs import run_auto, run_plain
from tests.online.trainings import TRAININGS

SHARES = {"checkpointing_inside": 0.8}
"""Of the in-core peak; 60% for the others."""
REFUSED = {
    "gan": "a later segment uses what it saves",
}
"""Why a part of the loop is not planned."""


@pytest.mark.parametrize("name", TRAININGS)
def test_a_loop_is_bitwise_what_it_was_and_within_its_budget_from_the_first_step_on(name: str, tmp_path: Path) -> None:
    gc.collect()
    expected = run_plain(TRAININGS[name])
    budget_bytes = int(expected.peak_bytes * SHARES.get(name, 0.6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        found = run_auto(TRAININGS[name], budget_bytes, tmp_path)
    assert found.equals(expected)
    assert found.peak_bytes <= budget_bytes
    assert found.session is not None
    assert found.planned_at is not None
    assert found.session.total.fallbacks == 0 or name in ("raising", "interrupted", "lengths")
    said = [str(one.message) for one in caught if "poochplan" in str(one.message)]
    assert not [text for text in said if "budget" in text]
    assert name not in REFUSED or any(REFUSED[name] in text for text in said)
