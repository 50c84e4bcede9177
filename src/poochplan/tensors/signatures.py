"""The tensors of a model and of a call, a line each: what tells one model from another, and one step's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from poochplan.torch_private.tensor_internals import pytree

from .storages import parts_of


def model_tensors(model: torch.nn.Module) -> tuple[str, ...]:
    """``name dtype[shape]`` of all parameters and buffers, in order, independent of the machine.

    A model for data-parallel training has those of the one that it wraps.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return tuple(
        _line(name.replace("_orig_mod.", ""), tensor)
        for source in (inner.named_parameters(), inner.named_buffers())
        for name, tensor in source
    )


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """One line for each tensor in the arguments of a call, wherever it is nested: ``0 float32[32, 3, 224, 224]``,
    ``input_ids int64[8, 128]``, ``1.mask bool[8]``. What is no tensor is left out.
    """
    return tuple(_line(path, leaf) for path, leaf in (*tensor_leaves("", args), *tensor_leaves("", kwargs)))


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


def _line(path: str, tensor: torch.Tensor) -> str:
    shape = list(parts_of(tensor)[0].shape if tensor.is_nested else tensor.shape)  # of a nested one, all its values'
    return f"{path} {str(tensor.dtype).removeprefix('torch.')}{shape}"
