"""The model that a library calls, found from the one that it shows."""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel

from poochplan.torch_private.compiler_internals import is_compiled


def called_by(trainer: object, model: torch.nn.Module) -> torch.nn.Module:
    """The one that transformers' Trainer calls, such as the compiled one of ``torch_compile=True``."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return wrapped if isinstance(wrapped, torch.nn.Module) and is_compiled(wrapped) else outermost(model)


def outermost(model: torch.nn.Module) -> torch.nn.Module:
    """The data-parallel wrapper that has been put around the model, else itself."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return model
    if isinstance(model, DistributedDataParallel):
        return model
    return next(
        (one for one in gc.get_objects() if type(one) is DistributedDataParallel and one.module is model), model
    )
