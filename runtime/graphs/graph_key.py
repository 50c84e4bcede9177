"""What tells one graph of compiled code from another, whatever order they are compiled in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from poochplan.torch_private.tensor_internals import pytree


def graph_key(graph: torch.fx.Graph, output_count: int, static: Iterable[int]) -> str:
    """Digest of a forward's ops, what they are given, dtypes, shapes and strides, and which inputs are static.

    Names of nodes are in it: a plan names what is replayed by them.
    """
    digest = hashlib.sha256(f"{output_count} {sorted(static)}\n".encode())
    for node in graph.nodes:
        given = pytree.tree_map(_named, (node.args, node.kwargs))
        digest.update(f"{node.name} {node.op} {node.target} {given} {_lies(node.meta.get('val'))}\n".encode())
    return digest.hexdigest()[:16]


def _named(given: Any) -> str:
    return f"%{given.name}" if isinstance(given, torch.fx.Node) else repr(given)


def _lies(value: Any) -> str:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return " ".join(f"{x.device.type} {x.dtype} {tuple(x.shape)} {x.stride()}" for x in tensors)
