"""The partitioner: Inductor's own split, and then the points of the runtime's clock, and a plan's replays, in it.

It knows of no plan but a digest of the replays that one asks for, so the compiler's caches tell the code of one plan
from that of another; what is kept and what is swapped is in no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import partial
from operator import is_not
from typing import Any

import torch

from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.torch_private.compiler_internals import counts_as, stock_partition
from poochplan.torch_private.tensor_internals import pytree

from .anchors import VERSION, in_memory_from
from .nodes import Node, give, given_by, inputs_of, is_gradient, rounds_in_kernels, views_of, writes
from .points import DEFERRED_UNPACK, SAVE
from .rewriting import Split, write_replays

Replays = Mapping[str, Collection[str]]
"""By the key of a graph, the names of what it saves and a plan has recomputed."""
_REPLAYS: dict[str, Replays] = {}
"""By their digest. A partitioner holds no more than that: the compiler pickles it into its caches' keys."""
_UNCHECKED = "saved_tensor_with_no_vc_check"
"""Of a node: it may be written behind the forward, autograd does not look."""


class Partitioner:
    """Splits a joint graph as Inductor does by itself, so that what is saved and all bits are the same.

    In graph mode both halves then get ``replays`` and points. Without them (``None``), in compiled blocks of an eager
    model, backwards get deferred unpacks, and one compile serves all plans. There a graph that tells anything in 16
    bits stays as it is: which nodes share a kernel decides there what is rounded, the compiler may choose otherwise
    where there are deferred unpacks, and nothing compares the steps of such blocks.
    """

    def __init__(self, replays: Replays | None = None) -> None:
        counts_as(Partitioner, "CustomPartitionerFn")
        self.digest = ""
        if replays is not None:
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
        static = static_lifetime_input_indices or ()
        forward, backward = stock_partition(
            gm,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            **kwargs,
        )
        inputs = inputs_of(forward.graph)
        split = Split(forward, backward, num_fwd_outputs, frozenset(inputs[place].name for place in static))
        if not self.digest:
            if not (rounds_in_kernels(forward.graph) or rounds_in_kernels(backward.graph)):
                defer_unpacks(split)
        elif joint_inputs and not (_holds_graphs(forward) or _holds_graphs(backward)):
            key = graph_key(forward.graph, num_fwd_outputs, static)
            if names := _REPLAYS[self.digest].get(key, ()):
                write_replays(split, names)
            self.saw(key, split)
            add_save_points(split, defer_unpacks(split))
        return forward, backward

    def saw(self, key: str, split: Split) -> None:
        """Told each graph in graph mode, its replays written, before its points are put in."""

    def uuid(self) -> str:
        """What the compiler's caches know it by."""
        return f"{VERSION}-{self.digest}"


def graph_key(graph: torch.fx.Graph, output_count: int, static: Collection[int]) -> str:
    """What tells one graph from another, whatever order they are compiled in: a digest of a forward's ops, what they
    are given, dtypes, shapes and strides, and which inputs are static.

    Names of nodes are in it: a plan names what is replayed by them.
    """
    digest = hashlib.sha256(f"{output_count} {sorted(static)}\n".encode())
    for node in graph.nodes:
        given = pytree.tree_map(
            lambda one: f"%{one.name}" if isinstance(one, Node) else repr(one), (node.args, node.kwargs)
        )
        digest.update(f"{node.name} {node.op} {node.target} {given} {_lies(node.meta.get('val'))}\n".encode())
    return digest.hexdigest()[:16]


def _lies(value: Any) -> str:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return " ".join(f"{x.device.type} {x.dtype} {tuple(x.shape)} {x.stride()}" for x in tensors)


def defer_unpacks(split: Split) -> set[str]:
    """Puts a deferred unpack before the first use of each saved tensor, parameters and buffers not; returns the names
    of those that it is put before.

    Until it is anchored (``anchors.py``), it only comes behind a gradient that is given.
    """
    graph = split.backward.graph
    saved = {node.name for node in split.saved()} - split.static
    place = {node: index for index, node in enumerate(graph.nodes)}
    inputs = inputs_of(graph)
    given = next(filter(is_gradient, inputs), None)
    deferred = [node for node in inputs if node.name in saved and _may_wait(node)]
    for node in deferred:
        first = min(node.users, key=lambda user: place[user])
        with graph.inserting_before(first):
            unpack = graph.call_function(DEFERRED_UNPACK, (node, given))
        unpack.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(unpack, delete_user_cb=partial(is_not, unpack))
    graph.lint()
    split.backward.recompile()
    return {node.name for node in deferred}


def _may_wait(node: Node) -> bool:
    """Whether it is an ordinary tensor that the backward only reads, and does not hand on."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not node.users:
        return False
    return not any(user.op == "output" or writes(user) for user in node.users)


def saved_nodes(split: Split) -> list[Node]:
    """What the forward makes and saves for backward, that a plan may decide about: in the order of its making."""
    saved = set(split.saved())
    return [node for node in split.forward.graph.nodes if node in saved and _may_leave(node)]


def add_save_points(split: Split, deferred: Collection[str]) -> None:
    """Has the forward hand out each of what it saves, and what is deferred in the backward, as soon as it is made; each
    behind the one before.

    A view puts what it is of into memory, where that may round it for who reads it next (``anchors.py``): it is handed
    out when that lies there anyway. What is no view lies there as an output, from its making on.
    """
    graph, output_count = split.forward.graph, split.output_count
    leaving = [node for node in saved_nodes(split) if node.name in deferred]
    for node in leaving:  # views for backward stand at a forward's end, and what they are of would stay until then
        *views, base = views_of(node)
        for view in reversed(views):
            base.append(view)
            base = view
    places = {node: place for place, node in enumerate(graph.nodes)}
    behind = {node: node for node in leaving}
    if rounds_in_kernels(graph):
        for node in leaving:
            base = views_of(node)[-1]
            behind[node] = node if base is node else max(node, in_memory_from(base, places), key=places.__getitem__)
    handed: dict[Node, Node] = {}
    last: Node | None = None
    ends: dict[Node, Node] = {}
    for node in sorted(leaving, key=lambda one: places[behind[one]]):
        with graph.inserting_after(ends.get(behind[node], behind[node])):
            point = graph.call_function(SAVE, (node, last))
        ends[behind[node]] = point
        point.meta["val"] = node.meta["val"]
        if _UNCHECKED in node.meta:
            point.meta[_UNCHECKED] = node.meta[_UNCHECKED]
        handed[node] = last = point
    given = given_by(graph)
    give(graph, (*given[:output_count], *(handed.get(node, node) for node in given[output_count:])))
    graph.lint()
    split.forward.recompile()


def _holds_graphs(module: torch.fx.GraphModule) -> bool:
    """Whether it calls graphs of its own (regions that are compiled once and called often, branches): it and they stay
    as they are, since what these save is the result of a node.
    """
    held = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return any(isinstance(getattr(module, name, None), torch.fx.GraphModule) for name in held)


def _may_leave(node: Node) -> bool:
    value = node.meta.get("val")
    if views_of(node)[-1].op != "call_function" or not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    return value.numel() * value.element_size() >= ALLOCATION_UNIT_BYTES
