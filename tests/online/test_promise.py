"""What steps under a plan take is compared with what it promised, once; a slower link is planned for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poochplan.formats.profile import preset_link
from tests.online.runs import opened, run_plain
from tests.online.trainings import dropout_and_batch_norm


def test_copies_slower_than_measured_are_told_and_planned_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    training = dropout_and_batch_norm()
    options = {"link": preset_link("nvlink2"), "throttle": "2MB/s", "quiet": False, "arena": "off"}
    losses = []
    with opened(training, tmp_path, budget="45%", **options) as session:
        for number in range(30):
            losses.append(list(training.turn(number)))
            if number >= 9:
                session.wait_until_planned(120)
        plan, profile = session.plan, session.profile
    said = [line for line in capsys.readouterr().err.splitlines() if "were predicted: copies" in line]
    assert len(said) == 1
    assert "another plan is made" in said[0]
    assert plan is not None
    assert profile.link.outward.bandwidth_bytes_per_s < preset_link("nvlink2").outward.bandwidth_bytes_per_s
    assert losses == run_plain(dropout_and_batch_norm, 30).losses
