"""What a loop computes for its log beside the loss, and holds until the next turn, is planned as kept."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.online.runs import run_auto, run_plain
from tests.online.trainings import CLASSES, WIDTH, Losses, Training, adam, batch, blocks
from tests.runtime.served import needs_compiler

pytestmark = pytest.mark.cpu_device


class WithSide(nn.Module):
    """Has a second head amid its layers, whose scores are no part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rest, self.side = blocks(3)[:-1], blocks(3), nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(rows)
        return self.rest(hidden), self.side(hidden)


def margin(scores: torch.Tensor, classes: torch.Tensor, side: torch.Tensor) -> Any:
    return nn.functional.multi_margin_loss(scores.tanh(), classes)


def histogram(scores: torch.Tensor, classes: torch.Tensor, side: torch.Tensor) -> Any:
    return torch.distributions.Categorical(logits=scores), scores.sigmoid().mean(0)


def side_head(scores: torch.Tensor, classes: torch.Tensor, side: torch.Tensor) -> Any:
    return {"side": nn.functional.cross_entropy(side, classes), "entropy": side.softmax(-1)}


class Average:
    """Of the probabilities of all turns; of the earlier ones without their graphs."""

    def __init__(self) -> None:
        self.value: Any = None

    def __call__(self, scores: torch.Tensor, classes: torch.Tensor, side: torch.Tensor) -> Any:
        before = 0.0 if self.value is None else self.value.detach() * 0.9
        self.value = scores.log_softmax(-1).exp() * 0.1 + before


def logging(log: Callable[[], Callable[..., Any]], *, keeps: bool = False) -> Training:
    model, (rows, classes) = WithSide(), batch(2048)
    optimizer, logged, beside = adam(model), list[Any](), log()

    def turn(_: int) -> Losses:
        scores, side = model(rows)
        loss = nn.functional.cross_entropy(scores, classes)
        record = beside(scores, classes, side)
        logged[:] = [*logged, record] if keeps else [record]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Training(model, [optimizer], turn)


LOGS: dict[str, Callable[[], Callable[..., Any]]] = {
    "another loss": lambda: margin,
    "a distribution": lambda: histogram,
    "a second head": lambda: side_head,
    "an average": Average,
}


@needs_compiler
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", LOGS)
def test_a_log_refuses_no_plan_and_is_counted(name: str, tmp_path: Path) -> None:
    gc.collect()
    make = functools.partial(logging, LOGS[name])
    expected = run_plain(make)
    budget_bytes = int(expected.peak_bytes * 0.75)
    found = run_auto(make, budget_bytes, tmp_path, arena="off")
    assert found.equals(expected)
    assert found.planned_at is not None
    assert found.session.total.fallbacks == 0
    (plan,) = found.session.plans.values()
    assert max(found.peaks[found.planned_at + 1 :]) <= budget_bytes
    assert found.session.last.peak_bytes == plan.prediction.peak_bytes


def hoarding() -> Training:
    """Keeps the graph of each turn's probabilities."""
    return logging(lambda: lambda scores, classes, side: torch.cat([scores] * 4, -1).softmax(-1), keeps=True)


def test_a_log_that_keeps_every_graph_is_planned_around_a_few_times_and_then_told(tmp_path: Path) -> None:
    expected = run_plain(hoarding, 45, is_metered=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_auto(hoarding, "75%", tmp_path, 45, is_metered=False, arena="off")
    assert found.equals(expected)
    (told,) = [str(one.message) for one in caught if "poochplan" in str(one.message)]
    assert "the loop keeps tensors" in told
    assert "loss.item()" in told
