"""``pooch profile`` shows what a profile advises, and ``pooch plan`` says it on stderr, unasked."""

from __future__ import annotations

from pathlib import Path

import poochplan
from tests.cli.conftest import Pooch


def test_a_model_in_eval_mode_is_warned_about_noted_and_advised_about(pooch: Pooch, workloads: Path) -> None:
    result = pooch.ok(f"profile {workloads}:resting -o resting.json --iterations 1 --warmup 1 --json")
    assert result.err.count("pooch: warning: ") == 1
    assert "pooch: warning: poochplan: the model was in eval mode: no dropout, no batch statistics" in result.err
    assert "the model was in eval mode: no dropout, no batch statistics" in result.data["notes"]
    assert "advice 1" in pooch("show resting.json").out
    (line,) = poochplan.Profile.load("resting.json").advice()
    result = pooch.ok("plan resting.json --budget 100% --json")
    assert f"advice: {line}" in result.err.splitlines()
    assert "advice" not in result.out
