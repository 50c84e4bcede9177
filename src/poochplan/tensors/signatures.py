"""Which model is this, and which inputs: signatures that do not depend on the machine, and where two models differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poochplan.errors import ModelMismatchError
from poochplan.formats.plan_set import Signature
from poochplan.formats.profile import ModelSignature

from .storages import parts_of


def model_signature(model: torch.nn.Module) -> ModelSignature:
    """Names, dtypes and shapes of all parameters and buffers, in order, and their digest.

    A model for data-parallel training has the signature of the one that it wraps.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    tensors = tuple(
        _entry(name.replace("_orig_mod.", ""), tensor)
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


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """One entry for each tensor in the arguments of a call, wherever it is nested: ``0 float32[32, 3, 224, 224]``,
    ``input_ids int64[8, 128]``, ``1.mask bool[8]``. What is no tensor is left out.
    """
    return tuple(_entry(path, leaf) for path, leaf in (*tensor_leaves("", args), *tensor_leaves("", kwargs)))


def tensor_leaves(path: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a call's arguments, each with its path."""
    found = []
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        inside = ".".join([*([path] if path else []), *(_text(key) for key in keys)])
        if isinstance(leaf, torch.Tensor):
            found.append((inside, leaf))
        elif isinstance(leaf, Mapping):  # such as transformers' BatchEncoding, which is no pytree node
            found += tensor_leaves(inside, dict(leaf))
    return found


def _text(key: Any) -> str:
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _entry(path: str, tensor: torch.Tensor) -> str:
    shape = list(parts_of(tensor)[0].shape if tensor.is_nested else tensor.shape)  # of a nested one, all its values'
    return f"{path} {str(tensor.dtype).removeprefix('torch.')}{shape}"
