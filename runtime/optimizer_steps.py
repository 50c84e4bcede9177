"""Where an optimizer of a model's steps: segments are counted from there, and one that was used ends there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Tell = Callable[[torch.optim.Optimizer], None]


@contextmanager
def around_optimizer_steps(model: torch.nn.Module, before: Tell, after: Tell) -> Iterator[None]:
    """Within the block, calls ``before`` and ``after`` around each step of an optimizer that has a parameter of
    ``model``.
    """

    def told(tell: Tell) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            own = set(map(id, model.parameters()))
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                tell(optimizer)

        return hook

    handles = register_optimizer_step_pre_hook(told(before)), register_optimizer_step_post_hook(told(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
