"""The arguments of an op as a flat list and back: what ``pytree`` does, quickly where they are flat.

Nearly all ops take tensors, numbers and lists of numbers. Only lists that hold tensors are opened.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from poochplan.torch_private.tensor_internals import pytree


class Flat(NamedTuple):
    """A call whose arguments hold no tensors within containers."""

    positional: int
    names: tuple[str, ...]


Layout = Flat | pytree.TreeSpec


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Layout]:
    """All leaves in order, and how they lay."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) not in _LEAVES and not _is_leaf(leaf):
            return pytree.tree_flatten((args, kwargs))
    return leaves, _flat(len(args), tuple(kwargs) if kwargs else ())


@functools.cache
def _flat(positional: int, names: tuple[str, ...]) -> Flat:
    return Flat(positional, names)


def unflatten(leaves: list[Any], layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``flatten`` took apart, with other leaves in their places."""
    if isinstance(layout, Flat):
        return tuple(leaves[: layout.positional]), dict(zip(layout.names, leaves[layout.positional :], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, layout)
    return args, kwargs


def outputs_of(outputs: Any) -> list[Any]:
    """The leaves of what an op returned."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if type(outputs) is tuple and all(type(output) in _LEAVES for output in outputs):
        return list(outputs)
    return pytree.tree_leaves(outputs)


_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), torch.dtype, torch.device}


def _is_leaf(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return not argument or type(argument[0]) in (int, bool, float, torch.SymInt)
    return not isinstance(argument, dict)
