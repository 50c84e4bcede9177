"""The examples do what they say. They run in this process: what each takes is mostly the import of torch."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from poochplan.workload import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
STACKS = (
    *("auto_loop", "accelerate_loop", "hf_trainer", "lightning_module"),
    *("ddp_torchrun", "fsdp_torchrun", "lightning_fsdp", "accelerate_fsdp", "trainer_fsdp"),
)
"""Tried in ``test_stacks.py``."""


def run(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


def test_the_plain_loop_trains_within_its_budget_and_with_the_same_gradients(capsys: pytest.CaptureFixture) -> None:
    plan, report, equal = run("plain_loop")
    assert equal
    assert any(value.decision != "keep" for value in plan.values)
    assert report.total.fallbacks == 0
    assert 0 < report.last_step.peak_bytes <= plan.budget_bytes < plan.prediction.in_core_peak_bytes
    assert "gradients equal: True" in capsys.readouterr().out


def test_ones_own_workload_is_planned_from_python_and_found_by_the_command_line() -> None:
    counts = run("own_workload")
    assert counts["swap"] + counts["recompute"] > 0
    loaded = load_workload(f"{EXAMPLES / 'own_workload.py'}:autoencoder", {"layers": "8"})
    assert loaded.parameters == {"layers": 8}
    assert loaded.workload.step().requires_grad


def test_steps_of_a_plan_set_follow_the_plan_of_their_length_or_the_next_larger_one() -> None:
    assert run("plan_set") == [64, 128, 128]


def test_every_example_is_tried_here_and_short_enough_to_read() -> None:
    scripts = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == {"plain_loop", "own_workload", "plan_set", *STACKS}
    assert max(scripts.values()) <= 55


def test_what_a_library_needs_is_shown_in_25_lines() -> None:
    lengths = {name: sum(map(bool, (EXAMPLES / f"{name}.py").read_text().splitlines())) for name in STACKS}
    assert max(lengths.values()) <= 25, lengths
