"""Which nodes of a graph never reach memory, since the compiler computes them where they are read.

An estimate of what Inductor's scheduler does: a pointwise node, or one that makes a constant, is computed within the
kernels that read it, where all of these are pointwise or reductions. It takes what its function takes, and no more.
"""

from __future__ import annotations

import torch

from poochplan.runtime.regions.nodes import readers
from poochplan.torch_private.tensor_internals import OpOverload

Node = torch.fx.Node
_MADE_ANYWHERE = ("aten.full", "aten.arange", "aten.scalar_tensor", "aten.zeros", "aten.ones", "prims.iota")
_POINTWISE = ("prims.convert_element_type", "prims.inductor_random", "aten.where", "aten.clone", "aten.constant_pad_nd")
_REDUCTIONS = ("sum", "mean", "var", "var_mean", "amax", "amin", "max", "min", "any", "all", "prod", "argmax", "argmin")


def never_in_memory(graph: torch.fx.Graph) -> frozenset[Node]:
    """Nodes that only pointwise nodes and reductions read."""
    return frozenset(node for node in graph.nodes if _is_pointwise(node) and _all_fuse(list(readers(node))))


def _all_fuse(reading: list[Node]) -> bool:
    return bool(reading) and all(_is_pointwise(one) or _is_reduction(one) for one in reading)


def _is_pointwise(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    name = str(node.target)
    return torch.Tag.pointwise in node.target.tags or name.startswith((*_MADE_ANYWHERE, *_POINTWISE))


def _is_reduction(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target).split(".")[1] in _REDUCTIONS
