"""``auto`` on the stand-in: it swaps before it has a plan, and plans of several sizes find their room while that lies
there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.runtime.devices.pinned import PinnedTier
from poochplan.runtime.session import Session
from tests.cuda_rules import streams
from tests.cuda_rules.machine import WHERE, on_stand_in
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK

WIDTH, TURNS = 32, 58
PLANNED_AT = (19, 44)
"""Behind these turns planning is waited for."""
PAGE_BYTES = 96 << 10
SessionOf = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(PinnedTier.__init__.__kwdefaults__, "page_bytes", PAGE_BYTES)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")  # the network takes less than it does by default
    (tmp_path / "user").mkdir()
    with empty_cache(tmp_path / "user"):
        yield


class Net(nn.Module):
    """``tail`` has no parameters: its backward may run behind a step of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
        )
        self.tail = nn.Sequential(nn.GELU(), nn.Tanh(), nn.GELU())

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(rows)
        return hidden, self.tail(hidden).square().mean()


def rows_of(number: int) -> int:
    """Few rows until they follow a plan, then many until these do, then both and some between."""
    if number <= PLANNED_AT[-1] + 2:
        return 256 if number <= PLANNED_AT[0] + 3 else 1024
    return (256, 1024, 512)[number % 3]


def trained(session_of: SessionOf) -> list[list[float]]:
    """Losses and sums of gradients of each turn. Each fifth step lets half of its backward to the turn behind it: so
    that part is left over where another plan begins to be followed.
    """
    torch.manual_seed(0)
    model = Net().to(WHERE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = {count: torch.randn(count, WIDTH).to(WHERE) for count in (256, 512, 1024)}
    seen: list[list[float]] = []
    left: list[torch.Tensor] = []
    with session_of(model, optimizer) as session:
        for number in range(TURNS):
            optimizer.zero_grad()
            hidden, loss = model(batches[rows_of(number)])
            is_half = number % 5 == 4
            (hidden.square().mean() if is_half else hidden.square().mean() + loss).backward()
            found = [loss, *(p.grad.double().sum() for p in model.parameters() if p.grad is not None)]
            if left:
                found += torch.autograd.grad(left[1], left[0])[0].double().sum()[None]
            left = [hidden, loss] if is_half else []
            del hidden, loss
            seen.append([one.item() for one in found])
            optimizer.step()
            if session is not None and number in PLANNED_AT:
                session.wait_until_planned(240)
    return seen


def under_auto(folder: Path, told: list[Session]) -> SessionOf:
    options: dict[str, Any] = {"link": LINK, "time_limit_s": 0.5, "on_over_budget": "warn", "quiet": True}
    options["on"] = "allocated"  # so small a network reserves one page, whatever is planned

    def session_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Session:
        told.append(poochplan.auto(model, optimizer, budget="70%", cache=folder, **options))
        return told[-1]

    return session_of


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # half a backward is not the planned one, and leaves bytes over
@pytest.mark.parametrize("cupy", [True, False])
def test_plans_of_several_sizes_are_followed_with_the_bits_of_plain_training(
    cupy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "OP_S", 1e-3)  # running an op again takes longer than copies of what it makes
    told: list[Session] = []
    with on_stand_in(cupy=cupy) as gpu:
        expected = trained(lambda *_: contextlib.nullcontext())
        assert trained(under_auto(tmp_path / "plans", told)) == expected
        assert gpu.violations == []
        assert gpu.host_memory.pinned == {}
    (session,) = told
    swapped = [sum(value.host_offset >= 0 for value in plan.values) for plan in session.plans.values()]
    assert len(swapped) >= 2
    assert min(swapped) > 0
    assert sum(one.begun for one in session._source.book.active.values()) > 15
    assert session.report().steps_followed > 10  # half a backward is none of these
