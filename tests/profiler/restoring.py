"""A network whose steps change what they like, and all of it that a profile has to put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import poochplan
from tests.runtime.nets import LINK

BATCH = torch.arange(32.0).reshape(4, 8).sin()


class Net(nn.Module):
    """Two layers and running statistics; ``changes`` is called in each forward, as a user's own code."""

    def __init__(self, changes: Callable[[Net], object] = lambda net: None, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if first is None else first
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.changes = changes

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.changes(self)
        return self.last(self.norm(self.first(batch)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH).square().sum().backward()
    optimizer.step()


def content_of(tensor: torch.Tensor) -> tuple[object, ...]:
    is_strided = tensor.layout is torch.strided
    dense = tensor.detach() if is_strided else tensor.detach().to_dense()
    dense = dense.dequantize() if dense.is_quantized else dense
    place = (tensor.stride(), tensor.untyped_storage().nbytes()) if is_strided else (tensor.layout,)
    return id(tensor), tensor.dtype, tensor.shape, *place, tensor.requires_grad, dense.clone().numpy().tobytes()


def _nested(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return content_of(value)
    if isinstance(value, dict):
        return id(value), [(id(k) if isinstance(k, torch.Tensor) else k, _nested(v)) for k, v in value.items()]
    return (id(value), [_nested(v) for v in value]) if isinstance(value, list) else value


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[object]:
    """Names, identities, geometry and content of all that a profile has to put back."""
    owned = (p for o in optimizers for group in o.param_groups for p in group["params"])
    parameters = dict.fromkeys([*model.parameters(), *owned])
    return [
        [
            (name, type(module), module.training, sorted(module._non_persistent_buffers_set))
            for name, module in model.named_modules()
        ],
        [(name, content_of(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        [(name, content_of(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        [None if p.grad is None else content_of(p.grad) for p in parameters],
        [content_of(p) for p in parameters],
        [_nested(x) for o in optimizers for x in (o.state, o.param_groups)],
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        str(np.random.get_state()[1].tolist()),
    ]


@contextlib.contextmanager
def unchanged(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[list[object]]:
    """Behind the block everything is as it was before."""
    before = everything(model, *optimizers)
    yield before
    assert everything(model, *optimizers) == before


def profile_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> None:
    options = {"iterations": 1, "link": LINK} | options
    poochplan.profile(lambda: model(BATCH).square().sum(), model=model, optimizer=optimizer, **options)
