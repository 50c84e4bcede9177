"""Anchors: what an arrival comes behind in the code, so that it stays right before the first use of its tensor.

An arrival depends on nothing, so the compiler could move it to the begin of the backward, and fuse other things with
each other. Its second argument holds it back. That is one more user of a node, and the compiler's patterns (an addition
to a matrix product, for one) take nodes of one user: so anchors are only set when all patterns have been through.
"""

from __future__ import annotations

from typing import Any

import torch

from poochplan.torch_private.compiler_internals import counts_as_graph_pass
from poochplan.torch_private.tensor_internals import OpOverload

from .arrivals import ARRIVE

VERSION = "poochplan-anchors-1"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""
_EXTERN = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention")


class AnchoringPass:
    """Anchors the arrivals of a backward, as ``post_grad_custom_post_pass``; other graphs stay as they are."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        anchor_arrivals(graph)

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return VERSION


counts_as_graph_pass(AnchoringPass)


def with_anchoring(passes: Any) -> tuple[Any, ...]:
    """The passes that the setting holds (None, one, or some), and ours behind them."""
    given = passes if isinstance(passes, tuple | list) else () if passes is None else (passes,)
    return (*(one for one in given if not isinstance(one, AnchoringPass)), AnchoringPass())


def anchor_arrivals(graph: torch.fx.Graph) -> None:
    """Moves each arrival right before its first use, behind a tensor that is in memory by then whatever is fused.

    That is the last of those that the first use depends on; where there is none, the last one made before it.
    """
    arrivals = graph.find_nodes(op="call_function", target=ARRIVE)
    if not arrivals:
        return
    place = {node: index for index, node in enumerate(graph.nodes)}
    anchors = _in_memory(graph)
    behind = _last_needed(graph, anchors, place)
    for arrival in arrivals:
        first = min(arrival.users, key=lambda user: place[user])
        before = (one for one in anchors if place[one] < place[first])
        after = behind[first] or max(before, key=lambda one: place[one], default=None)
        if after is not None:
            arrival.update_arg(1, after)
        first.prepend(arrival)


def is_gradient(node: torch.fx.Node) -> bool:
    """Whether it is a gradient that the backward is given; of an input."""
    return node.name.startswith("tangents")


def _in_memory(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Tensors that lie in memory: gradients that are given, and what ops take and make that no fusion takes up."""
    found = {node for node in graph.find_nodes(op="placeholder") if is_gradient(node)}
    for node in graph.nodes:
        if _is_extern(node):
            found |= {_without_views(one) for one in node.all_input_nodes}
            found |= {node} | {user for user in node.users if getattr(user.target, "__name__", "") == "getitem"}
    made = {node for node in found if node.op == "call_function" or is_gradient(node)}
    return {node for node in made if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not ARRIVE}


def _last_needed(
    graph: torch.fx.Graph, anchors: set[torch.fx.Node], place: dict[torch.fx.Node, int]
) -> dict[torch.fx.Node, torch.fx.Node | None]:
    """Of each node, the last of the anchors that it depends on, without what arrivals come behind."""
    last: dict[torch.fx.Node, torch.fx.Node | None] = {}
    for node in graph.nodes:
        inputs = () if node.target is ARRIVE else node.all_input_nodes
        needed = [one if one in anchors else last[one] for one in inputs]
        last[node] = max((one for one in needed if one is not None), key=lambda one: place[one], default=None)
    return last


def _is_extern(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and any(name in str(node.target) for name in _EXTERN)


def _without_views(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor of which it is a view, as far as the graph says."""
    while isinstance(node.target, OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
