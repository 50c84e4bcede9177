"""Small networks of blocks that Inductor compiles, and their steps. The blocks are alike: they compile once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.nets import snapshot


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


def fresh(checkpointed: str = "") -> tuple[nn.Module, torch.Tensor]:
    """The same network and batch each time."""
    torch.manual_seed(0)
    return Blocks(checkpointed=checkpointed), torch.randn(128, 32)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train(
    model: nn.Module, batch: torch.Tensor, steps: int = 3, back: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> list[list[torch.Tensor]]:
    """What :func:`snapshot` says after each step; ``back`` is how the loss goes backward."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        back(loss)
        seen.append(snapshot(model, loss))
        del loss
    return seen
