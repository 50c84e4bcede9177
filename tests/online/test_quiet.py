"""What ``auto`` says: nothing of what is no change of the steps, and else lines that are on one page of the docs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from poochplan.online import promise
from tests.online.runs import opened, run_auto
from tests.online.trainings import Training, batch, dropout_and_batch_norm, loss_of, stumbling
from tests.runtime.served import needs_compiler


def loading(training: Training) -> None:
    """A checkpoint of model and optimizer is read back."""
    training.model.load_state_dict({name: one.clone() for name, one in training.model.state_dict().items()})
    training.optimizers[0].load_state_dict(training.optimizers[0].state_dict())


def validating(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        loss_of(training.model, batch())
    training.model.train()


STUMBLES_AT = 15, 16, 19
BETWEEN: dict[str, tuple[Callable[[], Training], Callable[[Training], None]]] = {
    "a state dict": (dropout_and_batch_norm, loading),
    "validation": (dropout_and_batch_norm, validating),
    "an exception": (lambda: stumbling(lambda: ValueError("a bad batch"), STUMBLES_AT), lambda _: None),
    "Ctrl-C": (lambda: stumbling(KeyboardInterrupt, STUMBLES_AT), lambda _: None),
}


@needs_compiler
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.filterwarnings("error:poochplan:RuntimeWarning")
def test_nothing_is_said_and_nothing_is_planned_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "MOST", math.inf)  # a busy machine is said, and is no change of the steps
    torch.manual_seed(0)
    make, between = BETWEEN[name]
    training = make()
    with opened(training, tmp_path, quiet=False) as session:
        for number in range(14):
            training.turn(number)
            if number >= 9:
                session.wait_until_planned(120)
        assert session.plan is not None
        plans = dict(session.plans)
        capsys.readouterr()
        for number in range(14, 24):
            if number % 3 == 0:
                between(training)
            training.turn(number)
        assert dict(session.plans) == plans
        assert session.total.fallbacks == 0
    assert capsys.readouterr().err == ""


def test_a_model_compiled_as_a_whole_runs_in_core_and_one_line_says_what_to_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def whole() -> Training:
        training = dropout_and_batch_norm()
        training.model.compile(backend="aot_eager")
        return training

    session = run_auto(whole, "60%", tmp_path, 16, is_metered=False, quiet=False).session
    assert session.plan is None
    assert not session.profiles
    assert session.total.out_bytes == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "building" not in line]
    assert len(said) == 1
    assert "poochplan.compile" in said[0]
