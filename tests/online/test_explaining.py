"""A session of auto says where its step takes most, before there is a plan and under it."""

from __future__ import annotations

from pathlib import Path

import torch

from poochplan.units import format_bytes
from tests.online.runs import opened
from tests.online.trainings import dropout_and_batch_norm


def test_a_session_explains_the_in_core_peak_and_then_the_planned_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training, texts = dropout_and_batch_norm(), []
    with opened(training, tmp_path) as session:
        assert session.explain_peak() == ""
        for number in range(30):
            training.turn(number)
            if session.profile is not None:
                texts.append(session.explain_peak())
                session.wait_until_planned()
    assert texts[0].startswith(f"predicted peak {format_bytes(session.profile.in_core_peak_bytes)} in-core: in ")
    first = texts[-1].splitlines()[0]
    assert f" of a budget of {format_bytes(session.plan.budget_bytes)}, measured " in first
    assert f"measured {format_bytes(session.total.peak_bytes)}: in " in first
    assert texts[-1] == session.explain_peak()
