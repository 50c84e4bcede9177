"""The partitioner: Inductor's own split of a joint graph, plus points of the runtime's clock and a plan's replays.

Of the plan it has only a digest of the requested replays, so the compiler's caches distinguish the code of two plans.
The decisions keep and swap are in no code.

A deferred unpack depends on nothing, so the compiler could move it to the start of the backward, and fuse other nodes
than before. Its second argument, an anchor, keeps it right before the first use of its tensor. An anchor adds a user to
a node, and the compiler's patterns (for example an addition to a matrix product) take nodes with one user. So anchors
are set after all patterns have run.

An anchor is in memory once it is made, and the readers of a deferred unpack come after the anchor. Both may keep two
nodes out of one kernel. A 16-bit value is rounded between two kernels and not within one. So in graphs with 16-bit
values, no kernel reads an anchor before the anchor would be in memory anyway, and every reader of the deferred unpack
needs the anchor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import partial, reduce
from operator import and_, is_not, or_
from typing import Any

import torch

from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.torch_private.compiler_internals import counts_as, stock_partition, takes_several_passes
from poochplan.torch_private.tensor_internals import pytree, tensors_in

from .points import (
    DEFERRED_UNPACK,
    SAVE,
    Node,
    give,
    given_by,
    inputs_of,
    is_extern,
    is_gradient,
    is_part,
    readers,
    rounds_in_kernels,
    views_of,
    writes,
)
from .rewriting import Split, write_replays

Replays = Mapping[str, Collection[str]]
"""By the key of a graph: names of the saved nodes that a plan recomputes."""
_REPLAYS: dict[str, Replays] = {}
"""By their digest. A partitioner holds only the digest, because the compiler pickles it into its caches' keys."""
_UNCHECKED = "saved_tensor_with_no_vc_check"
"""Mark of a node that may be written after the forward, because autograd does not check its version."""
VERSION = "poochplan-compiled-1"
"""In the key of the compiler's caches, for this pass and the partitioner. Change it with the changes to graphs."""


class Partitioner:
    """Splits a joint graph as Inductor does, so that the saved tensors and all bits are the same.

    In graph mode both halves then get ``replays`` and points. Without replays (``None``), in compiled blocks of an
    eager model, backwards get deferred unpacks, and one compile serves all plans. There a graph with 16-bit values
    stays unchanged: fusion decides what is rounded, deferred unpacks may change the compiler's choice, and no step of
    such blocks is compared.
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
        """Called with each graph in graph mode, after its replays are written and before its points are inserted."""

    def uuid(self) -> str:
        return f"{VERSION}-{self.digest}"


def graph_key(graph: torch.fx.Graph, output_count: int, static: Collection[int]) -> str:
    """Identifies a graph, in any order of compilation: a digest of a forward's ops, their arguments, dtypes, shapes and
    strides, and of which inputs are static.

    Names of nodes are part of it, because a plan names its replays by them.
    """
    digest = hashlib.sha256(f"{output_count} {sorted(static)}\n".encode())
    for node in graph.nodes:
        given = pytree.tree_map(
            lambda one: f"%{one.name}" if isinstance(one, Node) else repr(one), (node.args, node.kwargs)
        )
        tensors = tensors_in(node.meta.get("val"))
        lies = " ".join(f"{x.device.type} {x.dtype} {tuple(x.shape)} {x.stride()}" for x in tensors)
        digest.update(f"{node.name} {node.op} {node.target} {given} {lies}\n".encode())
    return digest.hexdigest()[:16]


def defer_unpacks(split: Split) -> set[str]:
    """Inserts a deferred unpack before the first use of each saved tensor, except parameters and buffers. Returns the
    names of the nodes before which they stand.

    Before it is anchored, it is only placed after a given gradient.
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
    """Whether it is an ordinary tensor that the backward only reads, and does not return."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not node.users:
        return False
    return not any(user.op == "output" or writes(user) for user in node.users)


def saved_nodes(split: Split) -> list[Node]:
    """The nodes that the forward makes and saves, and about which a plan may decide, in the order of their making."""
    saved = set(split.saved())

    def may_leave(node: Node) -> bool:
        value = node.meta.get("val")
        if views_of(node)[-1].op != "call_function" or not isinstance(value, torch.Tensor) or value.is_sparse:
            return False
        return value.numel() * value.element_size() >= ALLOCATION_UNIT_BYTES

    return [node for node in split.forward.graph.nodes if node in saved and may_leave(node)]


def add_save_points(split: Split, deferred: Collection[str]) -> None:
    """Has the forward hand out, one after another, each saved tensor whose unpack is deferred, as soon as it is made.

    A view puts its base into memory. That may round the base for its next reader, so a view is handed out once the base
    is in memory anyway. A node that is no view is in memory from its making on, because it is an output.
    """
    graph, output_count = split.forward.graph, split.output_count
    leaving = [node for node in saved_nodes(split) if node.name in deferred]
    for node in leaving:  # views for backward are at a forward's end, and would keep their storages until then
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
    """Whether the graph calls other graphs (regions that are compiled once and called often, branches). Such graphs
    stay unchanged, because the saved tensors of the inner graph are the result of one node.
    """
    held = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return any(isinstance(getattr(module, name, None), torch.fx.GraphModule) for name in held)


class AnchoringPass:
    """Anchors the deferred unpacks of a backward, as ``post_grad_custom_post_pass``; other graphs stay unchanged.

    ``first``: a pass that runs before it, for a compiler that takes only one.
    """

    def __init__(self, first: Any = None) -> None:
        counts_as(AnchoringPass, "CustomGraphPass")
        self.first = first

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        anchor(graph)

    def uuid(self) -> Any:
        """None if the first pass is a plain function, which the caches cannot know."""
        if self.first is None:
            return VERSION
        first = self.first.uuid() if hasattr(self.first, "uuid") else None
        return first and (VERSION, first)


def with_anchoring(passes: Any) -> Any:
    """The passes of the setting (None, one, or several), followed by ours."""
    given = without_anchoring(passes)
    if not takes_several_passes():
        return AnchoringPass(given)
    return (*(given if isinstance(given, tuple | list) else () if given is None else (given,)), AnchoringPass())


def without_anchoring(passes: Any) -> Any:
    """The setting without our pass, which may remain in it when other code restores settings."""
    if isinstance(passes, AnchoringPass):
        return passes.first
    if not isinstance(passes, tuple | list) or not any(isinstance(one, AnchoringPass) for one in passes):
        return passes
    return tuple(one for one in passes if not isinstance(one, AnchoringPass)) or None


def anchor(graph: torch.fx.Graph) -> None:
    """Moves each deferred unpack right before its first use, after a tensor that is in memory by then however nodes are
    fused: the last one that the first use depends on. If there is none, the last one made before it.

    In graphs with 16-bit values: after the last tensor, if any, in memory anyway that all its users depend on.
    """
    unpacks = graph.find_nodes(op="call_function", target=DEFERRED_UNPACK)
    if not unpacks:
        return
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    anchors, rounds = _in_memory(graph), rounds_in_kernels(graph)
    if rounds:
        anchors = {one for one in anchors if in_memory_from(one, place) is one}
    bits = {one: 1 << place[one] for one in anchors}
    needed = _needed(nodes, bits)
    for unpack in unpacks:
        if not unpack.users:  # the patterns have removed its users
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


def in_memory_from(node: Node, place: dict[Node, int]) -> Node:
    """The node from which on it is in memory without our changes. This is the node itself, unless a node that may be
    fused with it reads it or its view before an op that is never fused does. Then it is that op, or the last reader if
    there is none.
    """
    ops = sorted((one for one in readers(node) if one.op == "call_function"), key=place.__getitem__)
    made = node.all_input_nodes[0] if is_part(node) else node
    if made.op == "placeholder" or is_extern(made) or not ops or is_extern(ops[0]):
        return node
    return next(filter(is_extern, ops), ops[-1])


def _in_memory(graph: torch.fx.Graph) -> set[Node]:
    """Tensors in memory: given gradients, and the inputs and results of ops that are never fused."""
    found = set(filter(is_gradient, inputs_of(graph)))
    for node in graph.nodes:
        if is_extern(node):
            found |= {views_of(one)[-1] for one in node.all_input_nodes}
            found |= {node} | set(filter(is_part, node.users))
    made = {node for node in found if node.op == "call_function" or is_gradient(node)}
    return {
        node for node in made if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not DEFERRED_UNPACK
    }


def _needed(nodes: list[Node], bits: dict[Node, int]) -> dict[Node, int]:
    """For each node, the bits of the anchors that it depends on. Inputs of deferred unpacks are not followed."""
    needed: dict[Node, int] = {}
    for node in nodes:
        inputs = () if node.target is DEFERRED_UNPACK else node.all_input_nodes
        needed[node] = reduce(or_, (needed[one] | bits.get(one, 0) for one in inputs), 0)
    return needed
