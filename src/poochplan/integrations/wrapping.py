"""The model that a library calls, found from the one that it shows."""

from __future__ import annotations

import torch

from poochplan.runtime.watch.census import wrapper_of
from poochplan.torch_private.compiler_internals import is_compiled


def called_by(trainer: object, model: torch.nn.Module) -> torch.nn.Module:
    """The one that transformers' Trainer calls, such as the compiled one of ``torch_compile=True``."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return wrapped if isinstance(wrapped, torch.nn.Module) and is_compiled(wrapped) else outermost(model)


def outermost(model: torch.nn.Module) -> torch.nn.Module:
    """The data-parallel wrapper that has been put around the model, else itself."""
    return wrapper_of(model) or model
