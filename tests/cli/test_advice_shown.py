"""``pooch profile`` shows what a profile advises, and ``pooch plan`` says it on stderr, unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import poochplan

Pooch = Any


def test_a_model_in_eval_mode_is_warned_about_noted_and_advised_about(pooch: Pooch, workloads: Path) -> None:
    once = ("--iterations", "1", "--warmup", "1")
    result = pooch("profile", f"{workloads}:resting", "-o", "resting.json", *once, "--json")
    assert result.code == 0
    assert result.err.count("pooch: warning: ") == 1
    assert "pooch: warning: poochplan: the model was in eval mode: no dropout, no batch statistics" in result.err
    assert "the model was in eval mode: no dropout, no batch statistics" in json.loads(result.out)["notes"]
    assert "advice 1" in pooch("show", "resting.json").out
    (line,) = poochplan.Profile.load("resting.json").advice()
    result = pooch("plan", "resting.json", "--budget", "100%", "--json")
    assert result.code == 0
    assert f"advice: {line}" in result.err.splitlines()
    assert "advice" not in json.dumps(json.loads(result.out))


def test_a_step_with_nothing_unusual_hears_no_advice(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "100%", "-o", "plan.json")
    assert result.code == 0
    assert "advice" not in result.out + result.err
