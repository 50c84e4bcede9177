"""What one step gives, told bit by bit: the loss and every gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from poochplan.profiler.step.forward_only import checked_loss
from poochplan.profiler.step.preserve import preserved

Bits = dict[str, str]
"""Digests, by what they are of."""


def bits_of_a_step(step: Callable[[], Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Bits:
    """Of the loss, each gradient and each buffer behind a step. Model, optimizer and generators stay as they were."""
    with preserved(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = None
        loss = checked_loss(step(), model)
        torch.autograd.backward(loss)
        found = {"the loss": _digest(loss)}
        found |= {
            f"the gradient of {name}": _digest(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        found |= {f"the buffer {name}": _digest(buffer) for name, buffer in model.named_buffers()}
    return found


def first_unequal(one: Bits, other: Bits) -> str:
    """The first thing of which the two tell other bits; empty where there is none."""
    return next((what for what in {**one, **other} if one.get(what) != other.get(what)), "")


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
