"""Blocks that begin to write, at a late step, what forward has saved or a replay reads, most past the dispatcher."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

Tensor = torch.Tensor
LIBRARY = torch.library.Library("poochprograms", "DEF")
LIBRARY.define("undeclared(Tensor x) -> Tensor")
LIBRARY.impl("undeclared", lambda x: (np.add(x.numpy(), 0.25, out=x.numpy()), x.new_zeros(1))[1], "CPU")


def _numpy(tensor: Tensor) -> object:
    array = tensor.detach().numpy()
    return np.add(array, 0.25, out=array)


def _view(tensor: Tensor) -> object:
    array = tensor.detach()[:, 1:3].numpy()
    return array.fill(0.25)


def _dlpack(tensor: Tensor) -> object:
    return torch.from_dlpack(tensor.detach()).add_(0.25)


def _bytes(tensor: Tensor) -> object:
    return ctypes.memset(tensor.data_ptr() + 8, 0x3D, tensor.nbytes - 8)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda tensor: tensor.data.copy_(tensor.round(decimals=1) + 0.25),
    "foreach": lambda tensor: torch._foreach_add_([tensor.data], 0.25),
    "numpy": _numpy,
    "numpy view": _view,
    "dlpack": _dlpack,
    "bytes": _bytes,
    "undeclared": lambda tensor: torch.ops.poochprograms.undeclared(tensor.detach()),
}
"""To a tensor that is saved already; with "fresh " in front to one that is made and not saved yet."""
OTHERS = "source", "buffer", "buffer data", "buffer resized", "buffer set", "parameter data", "parameter set"
"""To the source of a cast, or to what was there before the step, behind the op that reads it."""
LATE = (*WRITES, *(f"fresh {name}" for name in ("data", "numpy", "bytes", "undeclared")), *OTHERS)


class Late(nn.Module):
    """A linear layer and what is made of it; ``writes`` says whether the block has begun to write."""

    state: Tensor

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.writes = kind, False
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, width))
        self.register_buffer("state", torch.linspace(0.0, 0.5, width))

    def forward(self, hidden: Tensor) -> Tensor:
        value = torch.softmax(self.linear(hidden).float(), -1)  # which saves its result
        fresh, narrow = torch.zeros_like(value), value.to(torch.bfloat16)
        if self.writes and self.kind.startswith("fresh "):
            WRITES[self.kind.removeprefix("fresh ")](fresh)
        wide = narrow.float()
        found = torch.sin(value * 8 + hidden.float()) * torch.exp(fresh * 0.1) + wide.square()  # a product saves both
        shifted = (found + self.scale) + self.state  # which saves neither
        if self.writes:
            self._write(value, narrow)
        return (shifted.tanh() + narrow.float().sum() * 1e-3).to(hidden.dtype)

    def _write(self, value: Tensor, narrow: Tensor) -> None:
        if self.kind in WRITES:
            WRITES[self.kind](value)
        elif self.kind == "source":
            narrow.data.add_(0.5)
        elif self.kind == "buffer":
            with torch.no_grad():
                self.state.mul_(0.9).add_(value.detach().flatten(0, -2).mean(0), alpha=0.1)
        elif self.kind == "buffer data":
            self.state.data.add_(0.01)
        elif self.kind == "buffer resized":
            with torch.no_grad():
                self.state.resize_(2 * len(self.state)).fill_(0.25).resize_(len(self.state) // 2)
        elif self.kind == "buffer set":
            with torch.no_grad():
                self.state.set_(self.state * 0.5)
        elif self.kind == "parameter data":
            self.scale.data.mul_(0.99)
        elif self.kind == "parameter set":
            self.scale.data = self.scale.data * 0.99
