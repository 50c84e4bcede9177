"""Which model is this: a signature that does not depend on the machine, and the first layer where two differ."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

import torch

from ..errors import ModelMismatchError
from ..profiler.schema import ModelSignature


def model_signature(model: torch.nn.Module) -> ModelSignature:
    """Names, dtypes and shapes of all parameters and buffers, in order, and their digest.

    A model for data-parallel training has the signature of the one that it wraps.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    tensors = tuple(
        f"{name.replace('_orig_mod.', '')} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for source in (inner.named_parameters(), inner.named_buffers())
        for name, tensor in source
    )
    return ModelSignature(fingerprint=hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16], tensors=tensors)


def check_model(expected: ModelSignature, model: torch.nn.Module, what: str) -> None:
    """Raises ``ModelMismatchError`` naming the first parameter or buffer that differs.

    ``what`` is "plan" or "profile", for the message.
    """
    found = model_signature(model)
    if found.fingerprint == expected.fingerprint:
        return
    for wanted, seen in zip_longest(expected.tensors, found.tensors):
        if wanted != seen:
            raise ModelMismatchError(
                f"this {what} is for another model: expected {wanted or 'no further tensor'}, "
                f"found {seen or 'no further tensor'}; make a new profile and plan for this model"
            )
