"""Anchors: what a deferred unpack comes behind in the code, so that it stays right before the first use of its tensor.

A deferred unpack depends on nothing, so the compiler could move it to the begin of the backward, and fuse other things
with each other. Its second argument holds it back. That is one more user of a node, and the compiler's patterns (an
addition to a matrix product, for one) take nodes of one user: so anchors are only set when all patterns have been
through.

An anchor lies in memory from its making on, and what reads a deferred unpack comes behind the anchor. Both may keep two
nodes out of one kernel, and what 16 bits tell is rounded between two kernels and not in one. So in graphs that tell
anything in 16 bits, an anchor is read by no kernel before it would be in memory anyway, and all that reads the deferred
unpack needs it.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import Any

import torch

from poochplan.torch_private.compiler_internals import counts_as, takes_several_passes

from .nodes import inputs_of, is_extern, is_gradient, is_part, readers, rounds_in_kernels, views_of
from .points import DEFERRED_UNPACK

VERSION = "poochplan-compiled-1"
"""In the key of the compiler's caches, of this pass and of the partitioner; to be changed with what is done to graphs.
"""


class AnchoringPass:
    """Anchors the deferred unpacks of a backward, as ``post_grad_custom_post_pass``; other graphs stay as they are.

    ``first``: a pass that runs before it, of a compiler that takes one and no more.
    """

    def __init__(self, first: Any = None) -> None:
        counts_as(AnchoringPass, "CustomGraphPass")
        self.first = first

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        anchor(graph)

    def uuid(self) -> Any:
        """What the compiler's caches know it by."""
        return VERSION if self.first is None else (VERSION, self.first.uuid())


def with_anchoring(passes: Any) -> Any:
    """The passes that the setting holds (None, one, or some), and ours behind them."""
    given = without_anchoring(passes)
    if not takes_several_passes():
        return AnchoringPass(given)
    return (*(given if isinstance(given, tuple | list) else () if given is None else (given,)), AnchoringPass())


def without_anchoring(passes: Any) -> Any:
    """What the setting holds without ours, which may be left where somebody puts settings back as they were."""
    if isinstance(passes, AnchoringPass):
        return passes.first
    if not isinstance(passes, tuple | list) or not any(isinstance(one, AnchoringPass) for one in passes):
        return passes
    return tuple(one for one in passes if not isinstance(one, AnchoringPass)) or None


Place = dict[torch.fx.Node, int]
"""Of each node of a graph, where it stands."""


def anchor(graph: torch.fx.Graph) -> None:
    """Moves each deferred unpack right before its first use, behind a tensor that is in memory by then whatever is
    fused: the last of those that the first use depends on; where there is none, the last one made before it.

    In graphs that tell anything in 16 bits, behind the last of those that lie in memory anyway and that all its users
    depend on, if there is any.
    """
    unpacks = graph.find_nodes(op="call_function", target=DEFERRED_UNPACK)
    if not unpacks:
        return
    nodes = list(graph.nodes)
    place: Place = {node: index for index, node in enumerate(nodes)}
    anchors, rounds = _in_memory(graph), rounds_in_kernels(graph)
    if rounds:
        anchors = {one for one in anchors if in_memory_from(one, place) is one}
    bits = {one: 1 << place[one] for one in anchors}
    needed = _needed(nodes, bits)
    for unpack in unpacks:
        if not unpack.users:  # the patterns have left it none
            graph.erase_node(unpack)
            continue
        first = min(unpack.users, key=place.__getitem__)
        if rounds:
            behind = reduce(and_, (needed[user] for user in unpack.users))
        else:
            behind = needed[first] or reduce(or_, bits.values(), 0) & ((1 << place[first]) - 1)
        if behind:
            unpack.update_arg(1, nodes[behind.bit_length() - 1])
        first.prepend(unpack)


def in_memory_from(node: torch.fx.Node, place: Place) -> torch.fx.Node:
    """Where it first lies in memory without our doing: itself, unless something that may be fused with it reads it, or
    a view of it, before an op that no fusion takes up does; then that op, or its last reader where there is none.
    """
    ops = sorted((one for one in readers(node) if one.op == "call_function"), key=place.__getitem__)
    if _is_made_in_memory(node) or not ops or is_extern(ops[0]):
        return node
    return next(filter(is_extern, ops), ops[-1])


def _is_made_in_memory(node: torch.fx.Node) -> bool:
    made = node.all_input_nodes[0] if is_part(node) else node
    return made.op == "placeholder" or is_extern(made)


def _in_memory(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Tensors that lie in memory: gradients that are given, and what ops take and make that no fusion takes up."""
    found = set(filter(is_gradient, inputs_of(graph)))
    for node in graph.nodes:
        if is_extern(node):
            found |= {views_of(one)[-1] for one in node.all_input_nodes}
            found |= {node} | set(filter(is_part, node.users))
    made = {node for node in found if node.op == "call_function" or is_gradient(node)}
    return {
        node for node in made if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not DEFERRED_UNPACK
    }


def _needed(nodes: list[torch.fx.Node], bits: dict[torch.fx.Node, int]) -> dict[torch.fx.Node, int]:
    """Of each node, the bits of the anchors that it depends on, without what deferred unpacks come behind."""
    needed: dict[torch.fx.Node, int] = {}
    for node in nodes:
        inputs = () if node.target is DEFERRED_UNPACK else node.all_input_nodes
        needed[node] = reduce(or_, (needed[one] | bits.get(one, 0) for one in inputs), 0)
    return needed
