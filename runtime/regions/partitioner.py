"""The partitioner that puts arrivals into compiled backwards. It knows of no plan: one compile serves all plans."""

from __future__ import annotations

from typing import Any

import torch

from poochplan.torch_private.compiler_internals import counts_as_partitioner, stock_partition
from poochplan.torch_private.tensor_internals import OpOverload, schema_of

from .anchors import is_gradient, rounds_in_kernels
from .arrivals import ARRIVE

VERSION = "poochplan-arrivals-3"
"""In the key of the compiler's caches; to be changed with what is done to graphs."""


class ArrivingPartitioner:
    """Splits a joint graph as Inductor does by itself, so that what is saved and all bits are the same; then has the
    backward ask for each saved tensor right before its first use.

    A graph that tells anything in 16 bits stays as it is: which nodes share a kernel decides there what is rounded, the
    compiler may choose otherwise where there are arrivals, and nothing compares the steps of an eager model's blocks.
    """

    def __init__(self) -> None:
        counts_as_partitioner(ArrivingPartitioner)

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
        if not (rounds_in_kernels(forward.graph) or rounds_in_kernels(backward.graph)):
            add_arrivals(backward, _saved(forward, num_fwd_outputs, set(static or ())))
        return forward, backward

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return VERSION


def _saved(forward: torch.fx.GraphModule, output_count: int, static: set[int]) -> set[str]:
    """Names of what the forward graph saves for backward, without parameters and buffers."""
    (outputs,) = forward.graph.find_nodes(op="output")
    inputs = {node: index for index, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    saved = (node for node in outputs.args[0][output_count:] if isinstance(node, torch.fx.Node))
    return {node.name for node in saved if inputs.get(node) not in static or node not in inputs}


def add_arrivals(backward: torch.fx.GraphModule, saved: set[str]) -> set[str]:
    """Puts an arrival before the first use of each of the ``saved`` tensors; returns which of them arrive.

    Until it is anchored (``anchors.py``), it only comes behind a gradient that is given.
    """
    graph = backward.graph
    place = {node: index for index, node in enumerate(graph.nodes)}
    inputs = [node for node in place if node.op == "placeholder"]
    given = next((node for node in inputs if is_gradient(node)), None)
    arriving = [node for node in inputs if node.name in saved and _may_arrive(node)]
    for node in arriving:
        first = min(node.users, key=lambda user: place[user])
        with graph.inserting_before(first):
            arrival = graph.call_function(ARRIVE, (node, given))
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
