"""What the runtime itself takes is measured once for a process, on the CPU alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.profiler.trials.handle_cost import runtime_cost
from tests.runtime.nets import CASES, LINK


def test_a_profile_says_what_handles_swaps_and_recording_cost() -> None:
    cost = CASES["residual"].profile().runtime
    assert cost is not None
    assert 0 < cost.handle_s < 0.1
    assert 0 <= cost.swap_s < 1
    assert 0 < cost.record_s < 0.1


def test_without_steps_that_fit_handles_cost_what_they_do_on_a_small_network() -> None:
    measured_apart = CASES["residual"].profile(mode="fake").runtime
    assert measured_apart is runtime_cost("cpu", torch.get_num_threads())
    assert CASES["attention"].profile(mode="swap-all").runtime is measured_apart
    found = CASES["residual"].profile().runtime
    assert found is not None
    assert measured_apart is not None
    assert found.handle_s != measured_apart.handle_s
    assert (found.swap_s, found.record_s) == (measured_apart.swap_s, measured_apart.record_s)


def test_where_steps_differ_in_what_they_save_handles_are_not_timed_on_them() -> None:
    linear = torch.nn.Linear(4, 4)
    steps = itertools.count()

    def step() -> torch.Tensor:
        batch = torch.ones(2, 4)
        for _ in range(1 + next(steps)):
            batch = torch.tanh(linear(batch))
        return batch.sum()

    profile = poochplan.profile(step, model=linear, iterations=2, link=LINK)
    assert profile.runtime is runtime_cost("cpu", torch.get_num_threads())


def test_a_step_of_a_device_that_is_not_there_or_that_runs_behind_the_thread_has_none() -> None:
    assert CASES["residual"].profile(mode="fake", roofline="v100").runtime is None
    assert runtime_cost("cuda", 1) is None


def test_without_a_disk_to_swap_to_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIR", str(tmp_path / "missing"))
    assert runtime_cost.__wrapped__("cpu", torch.get_num_threads()) is None
