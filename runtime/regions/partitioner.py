"""The partitioner that puts arrivals into compiled backwards. It knows of no plan: one compile serves all plans."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from poochplan.tensors.torch_private import OpOverload, counts_as_partitioner, schema_of, stock_partition

from .arrivals import NAMESPACE, OP

VERSION = "poochplan-arrivals-1"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""
_EXTERN = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention")
ARRIVE: Any = getattr(getattr(torch.ops, NAMESPACE), OP).default


class ArrivingPartitioner:
    """Splits a joint graph as Inductor does by itself, so that what is saved and all bits are the same; then has the
    backward ask for each saved tensor right before its first use.
    """

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        static = static_lifetime_input_indices
        forward, backward = stock_partition(
            gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static, **kwargs
        )
        add_arrivals(backward, _saved(forward, num_fwd_outputs, set(static or ())))
        return forward, backward

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return VERSION


has_side_effect(ARRIVE)
counts_as_partitioner(ArrivingPartitioner)


def _saved(forward: torch.fx.GraphModule, output_count: int, static: set[int]) -> set[str]:
    """Names of what the forward graph saves for backward, without parameters and buffers."""
    (outputs,) = forward.graph.find_nodes(op="output")
    inputs = {node: index for index, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    saved = (node for node in outputs.args[0][output_count:] if isinstance(node, torch.fx.Node))
    return {node.name for node in saved if inputs.get(node) not in static or node not in inputs}


def add_arrivals(backward: torch.fx.GraphModule, saved: set[str]) -> set[str]:
    """Puts an arrival before the first use of each of the ``saved`` tensors; returns which of them arrive.

    It names a tensor that is in memory by then whatever is fused: otherwise it could be moved to the begin, and with
    another one fusion would change. That is the last of those that the first use depends on; where there is none, the
    last one made before it.
    """
    graph = backward.graph
    place = {node: index for index, node in enumerate(graph.nodes)}
    anchors = _in_memory(graph)
    behind = _last_needed(graph, anchors)
    arriving = [one for one in place if one.op == "placeholder" and one.name in saved and _may_arrive(one)]
    for node in arriving:
        first = min(node.users, key=lambda user: place[user])
        after = behind[first] or max(
            (one for one in anchors if place[one] < place[first]), key=lambda one: place[one], default=None
        )
        with graph.inserting_before(first):
            arrival = graph.call_function(ARRIVE, (node, after))
        arrival.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(arrival, delete_user_cb=lambda user, own=arrival: user is not own)
    graph.lint()
    backward.recompile()
    return {node.name for node in arriving}


def _may_arrive(node: torch.fx.Node) -> bool:
    """Whether it is an ordinary tensor that the backward only reads, and does not hand on."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not node.users:
        return False
    return not any(user.op == "output" or _writes(user) for user in node.users)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def _in_memory(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Tensors that lie in memory: gradients that are given, and what ops take and make that no fusion takes up."""
    found = {node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")}
    for node in graph.nodes:
        if _is_extern(node):
            found |= {_without_views(one) for one in node.all_input_nodes}
            found |= {node} | {user for user in node.users if getattr(user.target, "__name__", "") == "getitem"}
    made = {node for node in found if node.op == "call_function" or node.name.startswith("tangents")}
    return {node for node in made if isinstance(node.meta.get("val"), torch.Tensor)}


def _last_needed(graph: torch.fx.Graph, anchors: set[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node | None]:
    """Of each node, the last of the anchors that it depends on."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[torch.fx.Node, torch.fx.Node | None] = {}
    for node in graph.nodes:
        needed = [one if one in anchors else last[one] for one in node.all_input_nodes]
        last[node] = max((one for one in needed if one is not None), key=lambda one: place[one], default=None)
    return last


def _is_extern(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and any(name in str(node.target) for name in _EXTERN)


def _without_views(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor of which it is a view, as far as the graph says."""
    while isinstance(node.target, OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
