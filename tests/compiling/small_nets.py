"""A small network with two graph breaks, a dropout and batch statistics, and its steps; for tests of graph mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Link, LinkDirection
from poochplan.runtime.session import Session
from tests.runtime.nets import Case, equal, of, snapshot

_SLOW = LinkDirection(latency_s=0.1, bandwidth_bytes_per_s=1e4)
SLOW_LINK = Link(name="slow", outward=_SLOW, inward=_SLOW)
"""Over which nothing is swapped that can be recomputed."""
WIDTH, ROWS = 128, 512
Made = tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]


class Broken(nn.Module):
    """A compiler makes three graphs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(WIDTH, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.drop(self.norm(self.first(batch)).tanh())
        torch._dynamo.graph_break()
        batch = batch + self.drop(self.down(nn.functional.gelu(self.up(batch))))
        torch._dynamo.graph_break()
        return self.last(batch.exp().log1p())


def _broken() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    model, batch, labels = Broken(), torch.randn(ROWS, WIDTH), torch.randint(8, (ROWS,))
    return model, lambda model: nn.functional.cross_entropy(model(batch), labels)


fresh = Case(_broken, partial(torch.optim.SGD, lr=0.1, momentum=0.9)).fresh


def train(
    model: nn.Module, step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[list[torch.Tensor]]:
    """What :func:`snapshot` says after each step."""
    seen = []
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = step()
        loss.backward()
        seen.append(snapshot(model, loss))
        optimizer.step()
        del loss
    return seen


def stock(steps: int = 3, made: Callable[[], Made] = fresh) -> list[list[torch.Tensor]]:
    """The same of a model as Inductor compiles it by itself."""
    model, step, optimizer = made()
    model.compile(dynamic=False)
    return train(model, step, optimizer, steps)


def followed(make: Callable[[], Made], wanted: list[list[torch.Tensor]], budget: str, link: Link) -> Session:
    """The session that comes with a plan, whose steps fit the budget and give the bits of stock Inductor."""
    model, step, optimizer = make()
    made = poochplan.compile(model, step, optimizer=optimizer, budget=budget, link=link, iterations=1, time_limit_s=2)
    with made as session:
        assert equal(train(model, step, optimizer, len(wanted)), wanted)
    assert session.report().total.fallbacks == 0
    assert made.plan.prediction.peak_bytes <= made.plan.budget_bytes < made.plan.prediction.in_core_peak_bytes
    return session


class Products(nn.Module):
    """Products of matrices only, for which the compiler makes no C++; each saved tensor is told by its width."""

    widths = (64, 32, 48, 80, 16)

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(*pair, bias=False) for pair in zip(self.widths, self.widths[1:], strict=False))
        self.layers = nn.ModuleList(layers)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch


products = of(Products, 1024, Products.widths[0], optimizer=partial(torch.optim.SGD, lr=0.1)).fresh
