"""A buffer that forward begins to write after the profile, when a replay has yet to read it as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.runtime.nets import Case, equal, followed, of, train
from tests.runtime.random_plans import random_plan, windowed

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

Write = Callable[["Codes", torch.Tensor], None]


class Codes(nn.Module):
    """Two layers add what they find in a book. ``write`` is called behind each of them, once it is not None."""

    write: Write | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(20))
        self.register_buffer("book", torch.randn(40, 20))
        self.plain = torch.randn(20, 20)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(batch)
            with torch.no_grad():
                near = (hidden @ self.book.T).softmax(-1) @ self.book @ self.plain + self.bias.detach()
            batch = torch.tanh(hidden + near) * torch.sigmoid(near)
            if self.write is not None:
                with torch.no_grad():
                    self.write(hidden.detach())
        return batch


def _averaged(model: Codes, hidden: torch.Tensor) -> None:
    model.book.lerp_(hidden[:40], 0.1)


def _a_part(model: Codes, hidden: torch.Tensor) -> None:
    model.book[3:7] = hidden[:4]


def _out_argument(model: Codes, hidden: torch.Tensor) -> None:
    torch.mul(model.book, 0.9, out=model.book)


def _many_at_once(model: Codes, hidden: torch.Tensor) -> None:
    torch._foreach_mul_([model.book, model.plain], 0.9)


def _a_bias(model: Codes, hidden: torch.Tensor) -> None:
    model.bias.clamp_(-0.5, 0.5)


def _replaced(model: Codes, hidden: torch.Tensor) -> None:
    model.book = model.book * 0.9


WRITES = [_averaged, _a_part, _out_argument, _many_at_once, _a_bias, _replaced]


def fresh() -> Case:
    return of(Codes, 60, 20)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("seed", range(3))
def test_a_buffer_that_is_written_late(write: Write, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = fresh()
    plan = windowed(random_plan(case.profile(), seed, (0, 0, 1)), seed)
    steps = 0

    def late(place: str) -> None:
        nonlocal steps
        steps += place == "step"
        monkeypatch.setattr(Codes, "write", write if steps > 2 else None)

    wanted, _ = train(case, 5, at=late)
    steps = 0
    seen, report = train(case, 5, plan, late)
    assert equal(wanted, seen)
    assert report.total.replayed_values > 0


def test_a_copy_is_taken_as_it_was_at_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of each read, where the step writes between two reads."""
    case = fresh()
    plan = random_plan(case.profile(), 0, (0, 0, 1))
    monkeypatch.setattr(Codes, "write", _averaged)
    followed(case, plan, 3)


def test_a_buffer_written_in_profiled_steps_is_read_by_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codes, "write", _averaged)
    profile = fresh().profile()
    assert any("book" in value.unreplayable for value in profile.values)
