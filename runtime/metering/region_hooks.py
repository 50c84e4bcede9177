"""What the meter of live bytes has to be told of compiled regions, by what is called in place of them and by hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from poochplan.runtime.attachment import Hooks, own_hooks
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.handle import Handle
from poochplan.tensors.modes import compiled_modules

from .meter import LiveBytesMeter


def metered_hooks(meter: LiveBytesMeter, models: Mapping[str, torch.nn.Module]) -> Callable[[Engine], Hooks]:
    """The engine's; where the meter has to hear of what compiled regions save, it is told first."""

    def hooks(engine: Engine) -> Hooks:
        if not any(compiled_modules(model) for model in models.values()):
            return own_hooks(engine)

        def pack(tensor: torch.Tensor) -> Handle:
            meter.saved(tensor)
            return engine.pack(tensor)

        return pack, engine.unpack

    return hooks


def metered_regions(meter: LiveBytesMeter) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """What is called in the place of compiled callables: with the meter told, while it is on."""
    return lambda path, call: meter.around_region(call) if meter.is_on else call
