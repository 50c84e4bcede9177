"""``pooch profile`` shows what a profile advises, and ``pooch plan`` says it on stderr, unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import poochplan

Pooch = Any


def test_a_model_in_eval_mode_is_advised_about(pooch: Pooch, workloads: Path) -> None:
    result = pooch("profile", f"{workloads}:resting", "-o", "resting.json", "--iterations", "1", "--warmup", "1")
    assert result.code == 0
    assert "advice 1" in result.out
    (line,) = poochplan.Profile.load("resting.json").advice()
    result = pooch("plan", "resting.json", "--budget", "100%", "--json")
    assert result.code == 0
    assert f"advice: {line}" in result.err.splitlines()
    assert "advice" not in json.dumps(json.loads(result.out))


def test_a_step_with_nothing_unusual_hears_no_advice(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "100%", "-o", "plan.json")
    assert result.code == 0
    assert "advice" not in result.out + result.err
