"""Leaves the user's model, optimizer and generators as they were before the profile."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def preserved(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restores, after the block and on every path out of it: parameters, gradients, buffers, training flags, optimizer
    state and groups, and the generators of torch, numpy and Python. Tensors keep their identity and storage. What they
    held is kept in host memory, so that the device holds what it holds in training.
    """
    tensors = [_kept(tensor) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(p, p.grad, None if p.grad is None else _on_host(p.grad)) for p in model.parameters()]
    modules = [(module, dict(module._buffers), module.training) for module in model.modules()]
    optimizer_state = _optimizer_state(optimizer) if optimizer is not None else None
    generators = _generator_states()
    try:
        yield
    finally:
        with torch.no_grad():
            for module, buffers, training in modules:
                module._buffers.clear()
                module._buffers.update(buffers)
                module.training = training
            for restore in tensors:
                restore()
            for parameter, gradient, content in gradients:
                if gradient is not None and content is not None:
                    gradient.copy_(content)
                parameter.grad = gradient
            if optimizer is not None and optimizer_state is not None:
                _restore_optimizer(optimizer, optimizer_state)
        _restore_generators(generators)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(tensor: torch.Tensor) -> Callable[[], object]:
    """A call that puts the tensor's content back. By storage, since elements of an expanded buffer overlap."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        content = _on_host(tensor)
        return lambda: tensor.data.copy_(content)
    storage = tensor.untyped_storage()
    saved = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    return lambda: storage.copy_(saved)


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    state = {
        parameter: {
            name: (value, _on_host(value)) if isinstance(value, torch.Tensor) else (None, copy.deepcopy(value))
            for name, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    groups = [
        {name: value if name == "params" else copy.deepcopy(value) for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    return state, groups


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]
) -> None:
    state, groups = saved
    optimizer.state.clear()
    for parameter, entries in state.items():
        restored = optimizer.state[parameter] = {}
        for name, (tensor, content) in entries.items():
            restored[name] = content if tensor is None else tensor.copy_(content)
    for group, content in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(content)


def _generator_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _restore_generators(states: tuple[Any, ...]) -> None:
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)
