"""Which model is this: its signature, and where it differs from the one that a plan is for."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

import torch

from poochplan.errors import ModelMismatchError
from poochplan.formats.profile import ModelSignature
from poochplan.tensors.signatures import model_tensors


def model_signature(model: torch.nn.Module) -> ModelSignature:
    """The signature that profile and plan hold: all parameters and buffers, and their digest."""
    tensors = model_tensors(model)
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
