"""How often a loop looks at all of Python's objects and has garbage collected; and that nothing is missed by that."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.runtime.metering.census import census_bytes, live, one_moment
from tests.online.runs import run_auto
from tests.online.trainings import Losses, Training, adam, batch, blocks, dropout_and_batch_norm
from tests.runtime.cyclic import no_collector
from tests.runtime.nets import LINK

LARGE = 1 << 20
QUICK = {"quiet": False, "time_limit_s": 0.5, "link": LINK}
GARBAGE = "values that only Python's garbage collector frees"


class Cycle:
    """Dies with the next collection, with what it is given."""

    def __init__(self, held: object = None) -> None:
        self.own, self.held = self, held


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the collector, by this package."""
    found = Counter[str]()

    def counted(name: str) -> None:
        inner = getattr(gc, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += sys._getframe(1).f_globals["__name__"].startswith("poochplan.")
            return inner(*args, **kwargs)

        monkeypatch.setattr(gc, name, call)

    counted("get_objects")
    counted("collect")
    return found


def test_a_refused_loop_looks_seldom_and_the_next_one_hardly_ever(tmp_path: Path, calls: Counter[str]) -> None:
    with pytest.warns(RuntimeWarning, match="no plan fits"):
        run_auto(dropout_and_batch_norm, 100_000, tmp_path)
    assert calls["get_objects"] <= 5
    assert calls["collect"] <= 2
    calls.clear()
    with pytest.warns(RuntimeWarning, match="no plan fits"):
        run_auto(dropout_and_batch_norm, 100_000, tmp_path)
    assert calls["get_objects"] <= 1
    assert calls["collect"] == 0


def test_a_refusal_that_hangs_on_what_lives_beside_is_not_kept(tmp_path: Path) -> None:
    def run(*beside: torch.Tensor) -> bool:
        session = run_auto(dropout_and_batch_norm, 2_000_000, tmp_path).session
        assert session is not None
        return session.plan is not None

    with pytest.warns(RuntimeWarning, match="no plan fits"):
        assert not run(torch.ones(LARGE))
    gc.collect()
    assert run()


def test_a_second_run_collects_nothing(tmp_path: Path, calls: Counter[str]) -> None:
    run_auto(dropout_and_batch_norm, "60%", tmp_path)
    gc.collect()
    calls.clear()
    assert run_auto(dropout_and_batch_norm, "60%", tmp_path).planned_at == 0
    assert calls["get_objects"] <= 4
    assert calls["collect"] == 0


def test_what_waits_for_the_collector_is_no_reason_for_another_plan(
    tmp_path: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_auto(dropout_and_batch_norm, "60%", tmp_path)
    gc.collect()
    training = dropout_and_batch_norm()
    with (
        no_collector(),
        poochplan.auto(training.models, training.optimizers, budget="60%", cache=tmp_path, **QUICK) as session,  # type: ignore[arg-type]
    ):
        Cycle(torch.ones(LARGE))
        calls.clear()
        for number in range(3):
            training.turn(number)
        assert session.report().steps_followed == 3
        assert calls["collect"] == 1
    assert "another" not in capsys.readouterr().err


def test_who_looks_in_one_moment_sees_the_same_less_what_has_died(calls: Counter[str]) -> None:
    gc.collect()
    before_bytes = census_bytes("cpu")
    kept = torch.ones(LARGE, dtype=torch.uint8)
    let_go = Cycle(torch.ones(LARGE, dtype=torch.uint8))
    calls.clear()
    with one_moment():
        assert census_bytes("cpu") == before_bytes + 2 * LARGE
        del let_go
        assert census_bytes("cpu", before_bytes + 2 * LARGE) == before_bytes + 2 * LARGE
        assert census_bytes("cpu", before_bytes + LARGE) == before_bytes + LARGE
        assert not live(torch.optim.LBFGS)
    assert calls == {"get_objects": 1, "collect": 1}
    del kept
    assert census_bytes("cpu") == before_bytes


@pytest.mark.filterwarnings("ignore:poochplan")
@pytest.mark.parametrize("is_cycle", [True, False])
def test_what_only_the_collector_frees_of_a_captured_step_is_told(tmp_path: Path, *, is_cycle: bool) -> None:
    """What the loop holds at the end of its step is not."""
    model = blocks(4)
    optimizer, (data, _) = adam(model), batch()

    def turn(_: int) -> Losses:
        held = Cycle()
        held.held = output = model(data)
        loss = output.square().mean()
        loss.backward()
        if is_cycle:
            del held, output
        optimizer.step()
        if not is_cycle:
            held.own = None  # type: ignore[assignment]
        optimizer.zero_grad()
        return [loss.item()]

    session = run_auto(lambda: Training(model, [optimizer], turn), "90%", tmp_path).session
    assert session is not None
    assert session.profile is not None
    assert any(note.startswith(GARBAGE) for note in session.profile.notes) is is_cycle
