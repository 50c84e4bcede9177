"""Where an optimizer of a model's steps: segments are counted from there, and one that was used ends there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@contextmanager
def after_optimizer_steps(model: torch.nn.Module, tell: Callable[[], None]) -> Iterator[None]:
    """Within the block, calls ``tell()`` behind each step of an optimizer that has a parameter of ``model``."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = set(map(id, model.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            tell()

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()
