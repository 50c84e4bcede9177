"""A network whose steps leave garbage: a tensor in a reference cycle, which only Python's collector frees."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import nn

HELD_BYTES = 256 * 128 * 4
"""Of the tensor that each step leaves."""


class State:
    """Refers to itself through a closure."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.own = lambda: self


class Cyclic(nn.Module):
    """Linear, ReLU, linear. ``keep`` is called with the state around what the ReLU gives, in each step."""

    def __init__(self, keep: Callable[[Cyclic, State], object] = lambda model, state: None) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)
        self.state: State | None = None
        self._keep = keep

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(batch))
        self._keep(self, State(hidden))
        return self.second(hidden).sin()  # type: ignore[no-any-return]


def in_an_attribute(model: Cyclic, state: State) -> None:
    """The next step lets go of it."""
    model.state = state


def fresh(model: Cyclic) -> tuple[Cyclic, Callable[[], torch.Tensor], torch.optim.Optimizer]:
    """The model, its step and an optimizer that has no state."""
    batch = torch.randn(256, 64)
    return model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Nothing is collected within the block; what is left there is collected behind it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
