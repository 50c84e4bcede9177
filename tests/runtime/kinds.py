"""What a kind of op is to the tests of replays: a small network by name. Those of ``kinds_*.py`` enter themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.runtime.nets import Case, Net

Tensor = torch.Tensor
Body = Callable[[Net, Tensor], Tensor]
"""``net.a`` and ``net.b`` are the modules that it calls."""
TOKENS = torch.tensor([[1, 4, 0, 2, 2, 7], [3, 0, 5, 6, 1, 1]])


@dataclass
class Kind(Case):
    """A case whose replays are counted, and what must not be replayed in it."""

    least: int = 1
    """Values that are replayed in a step that recomputes all it may, at least."""
    refused: tuple[str, ...] = ()
    """What the reasons say for which values that the step bears are not recomputed."""
    mode_bytes: int = 0
    """What its backward takes more, at most, under a dispatch mode, where autograd has other formulas."""


KINDS: dict[str, Kind] = {}
IMAGE, VOLUME = (4, 6, 8, 8), (2, 4, 4, 6, 6)
WRITTEN_LATER = ("written in place after it was saved",)
"""Gates of recurrent cells: chunks of one storage, each written in place and saved before the next is written."""
ONEDNN = ("leaves some of its bytes unwritten",)
"""The padding of oneDNN's workspace."""


def kind(
    name: str,
    body: Body,
    *,
    shape: tuple[int, ...] = (6, 16),
    parts: Callable[[], tuple[nn.Module, ...]] = tuple,
    around: Callable[[], object] | None = None,
    memory_format: torch.memory_format | None = None,
    least: int = 1,
    refused: tuple[str, ...] = (),
    mode_bytes: int = 0,
) -> None:
    """Enters a network: ``body`` between a linear layer on the last dimension of ``shape`` and a sum of squares."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        named: dict[str, Any] = dict(zip("ab", parts(), strict=False))
        named |= {"generator": torch.Generator().manual_seed(7), "tokens": TOKENS.clone()}
        net = Net(lambda net, batch: body(net, net.first(batch).tanh()), first=nn.Linear(shape[-1], shape[-1]), **named)
        batch = torch.randn(shape)
        if memory_format is not None:
            net, batch = net.to(memory_format=memory_format), batch.to(memory_format=memory_format)

        def loss_of(model: nn.Module) -> Tensor:
            if around is None:
                return model(batch).square().mean()
            with around():  # type: ignore[attr-defined]
                return model(batch).float().square().mean()

        return net, loss_of

    KINDS[name] = Kind(
        make, functools.partial(torch.optim.SGD, lr=1e-3), least=least, refused=refused, mode_bytes=mode_bytes
    )
