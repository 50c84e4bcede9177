"""Anchors: what an arrival comes behind in the code, so that it stays right before the first use of its tensor.

An arrival depends on nothing, so the compiler could move it to the begin of the backward, and fuse other things with
each other. Its second argument holds it back. That is one more user of a node, and the compiler's patterns (an addition
to a matrix product, for one) take nodes of one user: so anchors are only set when all patterns have been through.

An anchor lies in memory from its making on, and what reads an arrival comes behind the anchor. Both may keep two nodes
out of one kernel, and what 16 bits tell is rounded between two kernels and not in one. So in graphs that tell anything
in 16 bits, an anchor is read by no kernel before it would be in memory anyway, and all that reads the arrival needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poochplan.torch_private.compiler_internals import counts_as_graph_pass, takes_several_passes

from .arrivals import ARRIVE
from .nodes import is_extern, is_part, readers, tells_16_bits, views_of

VERSION = "poochplan-anchors-3"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""


class AnchoringPass:
    """Anchors the arrivals of a backward, as ``post_grad_custom_post_pass``; other graphs stay as they are.

    ``first``: a pass that runs before it, of a compiler that takes one and no more.
    """

    def __init__(self, first: Any = None) -> None:
        counts_as_graph_pass(AnchoringPass)
        self.first = first

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        anchor_arrivals(graph)

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


def anchor_arrivals(graph: torch.fx.Graph) -> None:
    """Moves each arrival right before its first use, behind a tensor that is in memory by then whatever is fused.

    That is the last of those that the first use depends on; where there is none, the last one made before it.
    """
    arrivals = graph.find_nodes(op="call_function", target=ARRIVE)
    if not arrivals:
        return
    place = {node: index for index, node in enumerate(graph.nodes)}
    anchor = _anchors_that_round_nothing(graph, place) if rounds_in_kernels(graph) else _anchors(graph, place)
    for arrival in arrivals:
        if not arrival.users:  # the patterns have left it none
            graph.erase_node(arrival)
            continue
        if (after := anchor(arrival)) is not None:
            arrival.update_arg(1, after)
        min(arrival.users, key=place.__getitem__).prepend(arrival)


def rounds_in_kernels(graph: torch.fx.Graph) -> bool:
    """Whether anything in it is told in 16 bits: rounded where it leaves a kernel, and not within."""
    return any(map(tells_16_bits, graph.nodes))


def in_memory_from(node: torch.fx.Node, place: dict[torch.fx.Node, int]) -> torch.fx.Node:
    """Where it first lies in memory without our doing: itself, unless something that may be fused with it reads it, or
    a view of it, before an op that no fusion takes up does; then that op, or its last reader where there is none.
    """
    ops = sorted((one for one in readers(node) if one.op == "call_function"), key=place.__getitem__)
    if _is_made_in_memory(node) or not ops or is_extern(ops[0]):
        return node
    return next(filter(is_extern, ops), ops[-1])


Anchor = Callable[[torch.fx.Node], torch.fx.Node | None]
"""What an arrival comes behind."""


def _anchors(graph: torch.fx.Graph, place: dict[torch.fx.Node, int]) -> Anchor:
    anchors = _in_memory(graph)
    behind = _last_needed(graph, anchors, place)

    def anchor(arrival: torch.fx.Node) -> torch.fx.Node | None:
        first = min(arrival.users, key=place.__getitem__)
        before = (one for one in anchors if place[one] < place[first])
        return behind[first] or max(before, key=place.__getitem__, default=None)

    return anchor


def _anchors_that_round_nothing(graph: torch.fx.Graph, place: dict[torch.fx.Node, int]) -> Anchor:
    anchors = {one for one in _in_memory(graph) if in_memory_from(one, place) is one}
    needed: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        inputs = () if node.target is ARRIVE else node.all_input_nodes
        needed[node] = anchors.intersection(inputs).union(*(needed[one] for one in inputs))

    def anchor(arrival: torch.fx.Node) -> torch.fx.Node | None:
        common = set.intersection(*(needed[user] for user in arrival.users))
        return max(common, key=place.__getitem__, default=None)

    return anchor


def is_gradient(node: torch.fx.Node) -> bool:
    """Whether it is a gradient that the backward is given; of an input."""
    return node.name.startswith("tangents")


def _in_memory(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Tensors that lie in memory: gradients that are given, and what ops take and make that no fusion takes up."""
    found = {node for node in graph.find_nodes(op="placeholder") if is_gradient(node)}
    for node in graph.nodes:
        if is_extern(node):
            found |= {views_of(one)[-1] for one in node.all_input_nodes}
            found |= {node} | set(filter(is_part, node.users))
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


def _is_made_in_memory(node: torch.fx.Node) -> bool:
    made = node.all_input_nodes[0] if is_part(node) else node
    return made.op == "placeholder" or is_extern(made)
