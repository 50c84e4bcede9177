"""Which plans of earlier runs a loop finds again, and what a loop leaves that ended before its plan was made."""

from __future__ import annotations

import gc
import importlib
import os
import time
from pathlib import Path

import pytest
import torch

from poochplan.online.plan_cache import code_digest, switches_digest
from tests.online.runs import run_auto, run_plain
from tests.online.test_sessions import QUICK, planning
from tests.online.trainings import Training, blocks, dropout_and_batch_norm

MODEL = """
from torch import nn

class Model(nn.Linear):
    def forward(self, batch):
        return super().forward(batch).{}()
"""


def test_a_model_whose_code_has_changed_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan's replays were tried with the code of then."""
    file = tmp_path / "code_that_changes.py"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(MODEL.format("relu"))
    model = importlib.import_module("code_that_changes").Model(2, 2)
    before = code_digest(model)
    assert code_digest(model) == before
    file.write_text(MODEL.format("tanh"))
    assert code_digest(model) != before


def test_a_switch_of_a_module_makes_another_model_and_its_mode_does_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = switches_digest(model)
    model.eval()
    assert switches_digest(model) == before
    model[0].gradient_checkpointing = True
    assert switches_digest(model) != before


def test_a_compiled_or_replaced_call_makes_another_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = {switches_digest(model), switches_digest(torch.compile(model))}  # type: ignore[arg-type]
    model[0].forward = torch.nn.functional.relu
    assert len({*found, switches_digest(model)}) == 3


@pytest.mark.parametrize("changed", ["code_digest", "switches_digest"])
def test_a_run_of_other_code_or_switches_takes_no_plan_of_an_earlier_one(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_auto(dropout_and_batch_norm, "60%", tmp_path)
    same = run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=3)
    monkeypatch.setattr(f"poochplan.online.plan_cache.{changed}", lambda _: "other")
    other = run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=3)
    assert same.planned_at == 0
    assert other.planned_at is None


def micro_batches() -> Training:
    """Four to a step: the last three are alike."""
    model = blocks(4)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 32)

    def turn(_: int) -> list[float]:
        optimizer.zero_grad()
        losses = []
        for _ in range(4):
            loss = model(data).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        return losses

    return Training(model, [optimizer], turn)


def test_micro_batches_that_were_found_alike_are_not_profiled_again_in_the_next_run(tmp_path: Path) -> None:
    first = run_auto(micro_batches, "75%", tmp_path).losses
    gc.collect()  # what that run has left is not to live beside the next one
    second = run_auto(micro_batches, "75%", tmp_path, turns=4)
    assert second.losses == first[:4] == run_plain(micro_batches, 4).losses
    assert second.session is not None
    assert second.session._source.kinds == {}
    assert second.session.report().steps_followed >= 15


def test_a_loop_that_ends_while_it_is_planned_says_so_and_the_next_run_goes_on_from_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**QUICK, "quiet": False, "time_limit_s": 60}
    planning(dropout_and_batch_norm(), tmp_path, **options).close()
    said = capsys.readouterr().err
    found = run_auto(dropout_and_batch_norm, "60%", tmp_path)
    assert "the loop has ended while a plan was being made" in said
    assert found.session is not None
    assert found.session.plan is not None
    assert found.session._source.kinds == {}
    assert found.equals(run_plain(dropout_and_batch_norm))


def test_a_loop_of_few_steps_says_that_nothing_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=3, quiet=False)
    assert "the loop has ended before it was profiled" in capsys.readouterr().err


def test_what_no_plan_fits_is_refused_at_once_in_the_next_run_and_measured_anew_a_day_later(tmp_path: Path) -> None:
    """A step that was profiled wrongly for a budget would else be refused for ever."""

    def studies() -> bool:
        with pytest.warns(RuntimeWarning, match="no plan fits"):
            session = run_auto(dropout_and_batch_norm, 1000, tmp_path).session
        assert session is not None
        return bool(session._source.kinds)  # type: ignore[attr-defined]

    assert studies()
    assert not studies()
    for kept in tmp_path.rglob("profile.json"):
        os.utime(kept, (0, time.time() - 25 * 3600))
    assert studies()
