"""Models in eval, what they are called with, and passes from an arena."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

import poochplan
from poochplan.runtime.arena.pass_arena import PassArena

SETTLED = 3
"""So many passes of a kind are ordinary, or written down: those behind them are served as laid out."""
LARGE_BYTES = 64 << 10


def convolutions() -> nn.Module:
    parts = [nn.Sequential(nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for width in (3, 16, 16)]
    return nn.Sequential(*parts, nn.Flatten(), nn.LazyLinear(10))


class Skips(nn.Module):
    """Residual blocks with dropout, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.5), nn.Linear(512, 256))
            for _ in range(4)
        )
        self.skipped: set[int] = set()
        """Blocks that are not called."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = x + block(x)
        return x if scale is None else x * scale


class Recurrent(nn.Module):
    """An LSTM, and cells that are called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(128, 128)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        sequence, _ = self.rnn(x)
        state = torch.zeros(len(x), 128)
        for moment in sequence.unbind(1):
            state = self.cell(moment, state)
        return {"sequence": sequence, "state": state}


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@dataclass(frozen=True)
class Kind:
    """A model in eval, and its inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def fresh(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model, batch = self.build(), torch.randn(self.shape)
        with torch.no_grad():
            model(batch)  # lazy layers
        return model.eval(), batch


KINDS = {
    "convolutions": Kind(convolutions, (4, 3, 32, 32)),
    "skips": Kind(Skips, (128, 64)),
    "recurrent": Kind(Recurrent, (32, 20, 64)),
    "transformer": Kind(transformer, (16, 32, 64)),
}


@contextmanager
def served(model: nn.Module, *inputs: torch.Tensor) -> Iterator[PassArena]:
    """An arena with so many passes of each of the inputs behind it that the next is served as laid out."""
    with poochplan.arena(model) as arena, torch.no_grad():
        for batch in inputs:
            for _ in range(SETTLED):
                model(batch)
        yield arena


def plain(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model gives without an arena: a copy of it, which has no part in one."""
    with torch.no_grad():
        return leaves(copy.deepcopy(model)(batch))


def leaves(result: object) -> dict[str, torch.Tensor]:
    found = result if isinstance(result, dict) else {"": result}
    assert all(isinstance(one, torch.Tensor) for one in found.values())
    return found


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_served_whole(arena: PassArena) -> bool:
    """Whether the last served pass was as laid out."""
    found = arena.report()
    return found.served > 0 and not found.missed and not found.unserved
