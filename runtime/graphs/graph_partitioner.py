"""Graph mode's partitioner: Inductor's own split, save points in the forward, replays and arrivals in the backward.

It holds nothing but a digest of the replays that a plan asks for, so the compiler's caches tell the code of one plan
from that of another; what is kept and what is swapped is in no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx.node import has_side_effect

from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.runtime.regions.anchors import in_memory_from, rounds_in_kernels
from poochplan.runtime.regions.arrivals import NAMESPACE
from poochplan.runtime.regions.nodes import views_of
from poochplan.runtime.regions.partitioner import add_arrivals
from poochplan.torch_private.compiler_internals import counts_as_partitioner, stock_partition

from . import save_points
from .graph_key import graph_key
from .rewriting import Split, give, given_by, write_replays

__all__ = ["SAVE", "GraphPartitioner", "Replays", "add_save_points", "has_save_points", "saved_nodes"]

Replays = Mapping[str, Collection[str]]
"""By the key of a graph, the names of what it saves and a plan has recomputed."""
VERSION = "poochplan-graph-7"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""
SAVE: Any = getattr(getattr(torch.ops, NAMESPACE), save_points.OP).default
has_side_effect(SAVE)
_UNCHECKED = "saved_tensor_with_no_vc_check"
"""Of a node: it may be written behind the forward, autograd does not look."""
_REPLAYS: dict[str, Replays] = {}
"""By their digest."""


class GraphPartitioner:
    """Splits a joint graph as Inductor does by itself, and puts a plan's replays and the points of the runtime's clock
    into both halves.
    """

    def __init__(self, replays: Replays) -> None:
        counts_as_partitioner(GraphPartitioner)
        text = repr(sorted((key, sorted(names)) for key, names in replays.items()))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        _REPLAYS[self.digest] = replays

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
        if not joint_inputs or _holds_graphs(forward) or _holds_graphs(backward):
            return forward, backward
        key = graph_key(forward.graph, num_fwd_outputs, static or ())
        inputs = forward.graph.find_nodes(op="placeholder")
        split = Split(forward, backward, num_fwd_outputs, frozenset(inputs[place].name for place in static or ()))
        if names := _REPLAYS[self.digest].get(key, ()):
            write_replays(split, names)
        self.saw(key, split)
        arriving = add_arrivals(backward, {node.name for node in split.saved()} - split.static)
        add_save_points(split, arriving)
        return forward, backward

    def saw(self, key: str, split: Split) -> None:
        """Told each graph, its replays written, before its points are put in."""

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return f"{VERSION}-{self.digest}"


def saved_nodes(split: Split) -> list[torch.fx.Node]:
    """What the forward makes and saves for backward, that a plan may decide about: in the order of its making."""
    saved = set(split.saved())
    return [node for node in split.forward.graph.nodes if node in saved and _may_leave(node)]


def add_save_points(split: Split, arriving: Collection[str]) -> None:
    """Has the forward hand out each of what it saves, and what arrives in the backward, as soon as it is made; each
    behind the one before.

    A view puts what it is of into memory, where that may round it for who reads it next (``anchors.py``): it is handed
    out when that lies there anyway. What is no view lies there as an output, from its making on.
    """
    graph, output_count = split.forward.graph, split.output_count
    leaving = [node for node in saved_nodes(split) if node.name in arriving]
    for node in leaving:
        _move_to_base(node)
    places = {node: place for place, node in enumerate(graph.nodes)}
    behind = {node: node for node in leaving}
    if rounds_in_kernels(graph):
        for node in leaving:
            base = views_of(node)[-1]
            behind[node] = node if base is node else max(node, in_memory_from(base, places), key=places.__getitem__)
    handed: dict[torch.fx.Node, torch.fx.Node] = {}
    last: torch.fx.Node | None = None
    ends: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in sorted(leaving, key=lambda one: places[behind[one]]):
        with graph.inserting_after(ends.get(behind[node], behind[node])):
            point = graph.call_function(SAVE, (node, last))
        ends[behind[node]] = point
        point.meta["val"] = node.meta["val"]
        if _UNCHECKED in node.meta:
            point.meta[_UNCHECKED] = node.meta[_UNCHECKED]
        handed[node] = last = point
    given = given_by(split.forward)
    give(split.forward, (*given[:output_count], *(handed.get(node, node) for node in given[output_count:])))
    graph.lint()
    split.forward.recompile()


def has_save_points(graph: torch.fx.GraphModule) -> bool:
    """Whether it is a forward that hands out what it saves."""
    return bool(graph.graph.find_nodes(op="call_function", target=SAVE))


def _holds_graphs(module: torch.fx.GraphModule) -> bool:
    """Whether it calls graphs of its own (regions that are compiled once and called often, branches): it and they stay
    as they are, since what these save is the result of a node.
    """
    held = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return any(isinstance(getattr(module, name, None), torch.fx.GraphModule) for name in held)


def _move_to_base(node: torch.fx.Node) -> None:
    """Views are taken where what they are of is made: those for backward stand at a forward's end, and what they are of
    would stay until then.
    """
    views = views_of(node)
    last = views.pop()
    while views:
        last.append(views[-1])
        last = views.pop()


def _may_leave(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if views_of(node)[-1].op != "call_function" or not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    return value.numel() * value.element_size() >= ALLOCATION_UNIT_BYTES
