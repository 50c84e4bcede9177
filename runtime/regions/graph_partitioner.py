"""Graph mode's partitioner: Inductor's own split, with save points in the forward, replays and arrivals in the backward.

It holds nothing but a digest of the replays that a plan asks for, so the compiler's caches tell the code of one plan
from that of another; what is kept and what is swapped is in no code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.tensors.torch_private import counts_as_partitioner, stock_partition

from . import save_points
from .arrivals import NAMESPACE
from .partitioner import add_arrivals

VERSION = "poochplan-graph-1"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""
_SAVE: Any = getattr(getattr(torch.ops, NAMESPACE), save_points.OP).default
has_side_effect(_SAVE)


class GraphPartitioner:
    """Splits a joint graph as Inductor does by itself, and puts the points of the runtime's clock into both halves."""

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
        saved = [node.name for node in saved_nodes(forward, num_fwd_outputs)]
        add_save_points(forward, num_fwd_outputs)
        add_arrivals(backward, set(saved))
        return forward, backward

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return VERSION


counts_as_partitioner(GraphPartitioner)


def saved_nodes(forward: torch.fx.GraphModule, output_count: int) -> list[torch.fx.Node]:
    """What the forward makes and saves for backward, that a plan may decide about: in the order of its making."""
    (outputs,) = forward.graph.find_nodes(op="output")
    saved = {node for node in outputs.args[0][output_count:] if isinstance(node, torch.fx.Node)}
    return [node for node in forward.graph.nodes if node in saved and _may_leave(node)]


def add_save_points(forward: torch.fx.GraphModule, output_count: int) -> None:
    """Has the forward hand out each of what it saves as soon as it is made, each behind the one before."""
    graph = forward.graph
    (outputs,) = graph.find_nodes(op="output")
    handed: dict[torch.fx.Node, torch.fx.Node] = {}
    last: torch.fx.Node | None = None
    for node in saved_nodes(forward, output_count):
        with graph.inserting_after(node):
            point = graph.call_function(_SAVE, (node, last))
        point.meta["val"] = node.meta["val"]
        handed[node] = last = point
    given = outputs.args[0]
    outputs.args = ((*given[:output_count], *(handed.get(node, node) for node in given[output_count:])),)
    graph.lint()
    forward.recompile()


def has_save_points(graph: torch.fx.GraphModule) -> bool:
    """Whether it is a forward that hands out what it saves."""
    return bool(graph.graph.find_nodes(op="call_function", target=_SAVE))


def _may_leave(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    return value.numel() * value.element_size() >= ALLOCATION_UNIT_BYTES
