"""The examples do what they say. They run in this process: what each takes is mostly the import of torch."""

from __future__ import annotations

import pytest

from poochplan.workload import load_workload
from tests.examples.ranks import EXAMPLES, main_of

STACKS = (
    *("auto_loop", "accelerate_loop", "hf_trainer", "lightning_module"),
    *("ddp_torchrun", "fsdp_torchrun", "lightning_fsdp", "accelerate_fsdp", "trainer_fsdp"),
)
"""Tried in ``test_stacks.py``."""


def test_the_plain_loop_trains_within_its_budget_and_with_the_same_gradients(capsys: pytest.CaptureFixture) -> None:
    plan, report, equal = main_of("plain_loop")()
    assert equal
    assert any(value.decision != "keep" for value in plan.values)
    assert report.total.fallbacks == 0
    assert 0 < report.last_step.peak_bytes <= plan.budget_bytes < plan.prediction.in_core_peak_bytes
    assert "gradients equal: True" in capsys.readouterr().out


def test_ones_own_workload_is_planned_from_python_and_found_by_the_command_line() -> None:
    counts = main_of("own_workload")()
    assert counts["swap"] + counts["recompute"] > 0
    loaded = load_workload(f"{EXAMPLES / 'own_workload.py'}:autoencoder", {"layers": "8"})
    assert loaded.parameters == {"layers": 8}
    assert loaded.workload.step().requires_grad


def test_steps_of_a_plan_set_follow_the_plan_of_their_length_or_the_next_larger_one() -> None:
    assert main_of("plan_set")() == [64, 128, 128]


def test_every_example_is_tried_here_and_short_enough_to_read() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == {"plain_loop", "own_workload", "plan_set", *STACKS}
    assert max(map(len, scripts.values())) <= 55
    lengths = {name: sum(map(bool, scripts[name])) for name in STACKS}
    assert max(lengths.values()) <= 25, lengths  # what a library needs
