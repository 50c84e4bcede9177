"""Small networks of blocks that Inductor compiles, and their steps. The blocks are alike: they compile once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Profile
from poochplan.runtime.run_report import Report
from tests.runtime.nets import LINK, equal, snapshot


class Block(nn.Module):
    """Products, a dropout, and something that several tensors are saved of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.drop(self.down(nn.functional.gelu(self.up(self.norm(batch)))))


class Blocks(nn.Module):
    """Two compiled blocks, the first of which is called twice, between plain layers.

    ``checkpointed``: how the second is checkpointed by the user; empty for not.
    """

    def __init__(self, width: int = 32, checkpointed: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpointed = checkpointed
        for block in self.blocks:
            block.compile()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.blocks[0](self.first(batch).tanh())
        if self.checkpointed:
            batch = checkpoint(self.blocks[1], batch, use_reentrant=self.checkpointed == "reentrant")
        else:
            batch = self.blocks[1](batch)
        return self.last(self.blocks[0](batch).tanh())


class Chained(nn.Sequential):
    """With a forward of its own: the compiler leaves calls of torch's own containers alone."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self:
            batch = layer(batch)
        return batch


WAYS = ("wrapped", "in place")


def compiled(module: nn.Module, how: str, backend: Any) -> nn.Module:
    """By either way of asking for it."""
    if how == "wrapped":
        return torch.compile(module, backend=backend)  # type: ignore[return-value]
    module.compile(backend=backend)
    return module


def fresh(checkpointed: str = "") -> tuple[nn.Module, torch.Tensor]:
    """The same network and batch each time."""
    torch.manual_seed(0)
    return Blocks(checkpointed=checkpointed), torch.randn(128, 32)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def profiled(model: nn.Module, batch: torch.Tensor, **options: Any) -> Profile:
    return poochplan.profile(lambda: loss_of(model, batch), model=model, iterations=1, link=LINK, **options)


def train(
    model: nn.Module,
    batch: torch.Tensor,
    steps: int = 3,
    back: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    before: Callable[[], object] = int,
) -> list[list[torch.Tensor]]:
    """What :func:`snapshot` says after each step; ``back`` is how a loss goes backward, ``before`` runs before each."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad(set_to_none=True)
        before()
        loss = loss_of(model, batch)
        back(loss)
        seen.append(snapshot(model, loss))
        del loss
    return seen


def followed(plan: Plan | PlanSet, model: nn.Module, batch: torch.Tensor, wanted: list[list[torch.Tensor]]) -> Report:
    """As many steps under the plan: bitwise those, and to the end."""
    with poochplan.apply(plan, model) as session:
        assert equal(train(model, batch, len(wanted)), wanted)
    assert session.report().total.fallbacks == 0
    return session.report()
