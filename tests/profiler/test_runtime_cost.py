"""What the runtime itself takes is measured once for a process, on the CPU alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nets import CASES

from poochplan.profiler.runtime_cost import runtime_cost


def test_a_profile_says_what_handles_swaps_and_recording_cost() -> None:
    cost = CASES["residual"].profile().runtime
    assert cost is not None
    assert 0 < cost.handle_s < 0.1
    assert 0 <= cost.swap_s < 1
    assert 0 < cost.record_s < 0.1
    assert CASES["attention"].profile(mode="fake").runtime is cost


def test_a_step_of_a_device_that_is_not_there_or_that_runs_behind_the_thread_has_none() -> None:
    assert CASES["residual"].profile(mode="fake", roofline="v100").runtime is None
    assert runtime_cost("cuda", 1) is None


def test_without_a_disk_to_swap_to_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIR", str(tmp_path / "missing"))
    assert runtime_cost.__wrapped__("cpu", torch.get_num_threads()) is None
