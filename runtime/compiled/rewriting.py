"""Writes a plan's replays into compiled graphs. ``docs/graph-mode.md`` has the rules and the argument for them.

A joint graph was split into a forward, which returns the *saved* nodes, and a backward, which takes them. To recompute
a saved node, the forward no longer saves it, and copies of forward nodes in the backward make it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from poochplan.errors import UsageError
from poochplan.tensors.operators import is_chosen_by_timing, traits
from poochplan.torch_private.compiler_internals import mutated_inputs
from poochplan.torch_private.tensor_internals import OpOverload, pytree, schema_of

from .points import (
    Node,
    base_of,
    give,
    given_by,
    inputs_of,
    is_extern,
    is_part,
    is_view,
    readers,
    tells_16_bits,
    writes,
)

_SEEDS = ("inductor_seeds", "inductor_lookup_seed", "inductor_seed")
_IMPURE = "it depends on {name}, which draws anew or writes each time it runs"
_ROUNDED = "its bits depend on where {name} is rounded to 16 bits, which depends on what is fused with it"


class Split(NamedTuple):
    """A forward and its backward, as the partitioner returns them."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    output_count: int
    """Number of the forward's outputs before the saved ones."""
    static: frozenset[str]
    """Names of inputs that exist all step long: parameters and buffers."""

    def saved(self) -> tuple[Node, ...]:
        """The nodes that the forward saves, in the order of its outputs, without numbers."""
        nodes = (one for one in given_by(self.forward.graph)[self.output_count :] if isinstance(one, Node))
        return tuple(node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor))


def why_never_replayed(split: Split, node: Node) -> str:
    """Why a saved node cannot be made again in the backward; empty if it can."""
    saved, written = set(split.saved()), _written_inputs(split.forward)
    made_again = {one.name for one in split.backward.graph.nodes if one.op == "call_function"}
    run: list[Node] = []
    for needed in _needs(node, saved):
        source = base_of(needed)
        if source in written:
            return f"it depends on {source.name}, an input that the step writes"
        if needed.op == "placeholder" and needed not in saved and needed.name not in split.static:
            return f"it depends on {needed.name}, an input of its graph that nothing saves"
        if needed.name in made_again and _is_start(needed) and needed not in saved:
            return f"it depends on {needed.name}, which the backward makes itself, for a checkpoint of the model's"
        is_run = needed is node or needed not in saved
        if is_run and needed.op == "call_function" and _is_impure(needed):
            return _IMPURE.format(name=needed.name)
        if is_run and not _is_start(needed):
            run.append(needed)
    rounded = _rounded_by_chance(split, node, run)
    return _ROUNDED.format(name=rounded.name) if rounded is not None else ""


_COMPILE_AGAIN = "call poochplan.compile(model, step, budget=...) again"


def write_replays(split: Split, names: Collection[str]) -> None:
    """Has the backward make the saved nodes of these names again, each before its first use.

    Raises ``UsageError`` if one cannot be made again: the plan was made for other code.
    """
    saved = split.saved()
    replayed = dict.fromkeys(node for node in saved if node.name in names)
    if len(replayed) < len(set(names)):
        lost = ", ".join(sorted(set(names) - {node.name for node in saved}))
        raise UsageError(f"plan: expected saved tensors named {lost} in compiled code, found none; {_COMPILE_AGAIN}")
    for node in replayed:
        if why := why_never_replayed(split, node):
            raise UsageError(f"plan: {node.name} cannot be recomputed in the compiled code: {why}; {_COMPILE_AGAIN}")
    _save_also(split, replayed)
    _replay_before_use(split, replayed)
    _save_no_more(split, replayed)
    for half in (split.forward, split.backward):
        half.graph.eliminate_dead_code()
        half.graph.lint()
        half.recompile()


def _needs(node: Node, ends: Collection[Node]) -> Iterator[Node]:
    """The nodes that a replay of ``node`` runs (itself included), and ``ends``, where it starts: inputs and seeds."""
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        yield one
        if one is not node and (one in ends or _is_start(one)):
            continue
        for given in one.all_input_nodes:
            if given not in seen:
                seen.add(given)
                pending.append(given)


def _is_start(node: Node) -> bool:
    return node.op == "placeholder" or any(seed in str(node.target) for seed in _SEEDS)


def _is_impure(node: Node) -> bool:
    if _is_start(node):
        return False
    if not isinstance(node.target, OpOverload):
        return not is_part(node)
    facts = traits(node.target)
    value = node.meta.get("val")
    if is_chosen_by_timing(facts, value.device.type if isinstance(value, torch.Tensor) else ""):
        return True
    return not facts.trusted or writes(node) or (facts.random and _draws(node))


def _draws(node: Node) -> bool:
    """Whether the op draws new random numbers: not with a dropout of 0; given a seed, it draws the same again."""
    if "inductor_random" in str(node.target):
        return False
    by_place = dict(zip((argument.name for argument in schema_of(node.target).arguments), node.args, strict=False))
    return bool({**by_place, **node.kwargs}.get("dropout_p", 1.0) != 0.0)


def _written_inputs(forward: torch.fx.GraphModule) -> set[Node]:
    """Inputs and constants that the graph itself writes, or that are written after it."""
    written = mutated_inputs(forward.graph)
    for node in forward.graph.nodes:
        facts = traits(node.target)
        arguments = [node.args[place] for place in facts.written if place < len(node.args)]
        arguments += [node.kwargs[name] for name in facts.written_names if name in node.kwargs]
        written |= {base_of(one) for one in pytree.tree_leaves(arguments) if isinstance(one, Node)}
    return written


def _rounded_by_chance(split: Split, node: Node, run: list[Node]) -> Node | None:
    """A node that one kernel may both make and read, in the replay of ``node`` (which runs ``run``) or by the replay's
    readers. Whether its value is rounded to 16 bits is then the compiler's choice. None if there is no such node.
    """
    taken = [one for one in inputs_of(split.backward.graph) if one.name == node.name]
    read = [node] if any(_may_fuse(reader) for one in taken for reader in readers(one)) else []
    read += [given for reader in run if _may_fuse(reader) for given in reader.all_input_nodes]
    return next((one for one in read if tells_16_bits(one) and _may_fuse(base_of(one))), None)


def _may_fuse(node: Node) -> bool:
    """Whether it may be part of a kernel with other nodes."""
    return node.op == "call_function" and not (is_view(node) or is_part(node) or is_extern(node))


def _save_also(split: Split, replayed: Collection[Node]) -> None:
    """Also saves parameters and seeds from which these replays start, if nothing saves them yet. They come before the
    other saved nodes, among the tensors whose versions autograd checks.
    """
    saved, graph = set(split.saved()), split.backward.graph
    starts = [one for node in replayed for one in _needs(node, saved) if one is not node and _is_start(one)]
    nodes = [one for one in dict.fromkeys(starts) if one not in saved]
    given, count = given_by(split.forward.graph), split.output_count
    give(split.forward.graph, (*given[:count], *nodes, *given[count:]))
    first = split.saved()[len(nodes)]
    (place,) = [one for one in inputs_of(graph) if one.name == first.name]
    for node in nodes:
        with graph.inserting_before(place):
            taken = graph.placeholder(node.name)
        taken.meta.update(node.meta)


def _save_no_more(split: Split, nodes: Collection[Node]) -> None:
    given, count = given_by(split.forward.graph), split.output_count
    give(split.forward.graph, (*given[:count], *(one for one in given[count:] if one not in nodes)))
    names = {node.name for node in nodes}
    for taken in inputs_of(split.backward.graph):
        if taken.name in names:
            split.backward.graph.erase_node(taken)


def _replay_before_use(split: Split, replayed: Collection[Node]) -> None:
    """Writes each replay before the first node of the backward that needs its result."""
    graph, saved = split.backward.graph, set(split.saved())
    inputs = {one.name: one for one in inputs_of(graph)}
    there = {one: inputs[one.name] for one in split.forward.graph.nodes if one.name in inputs}
    order = {one: index for index, one in enumerate(split.forward.graph.nodes)}
    made: dict[Node, Node] = {}

    def replay(node: Node, before: Node) -> Node:
        """The copy of ``node``, after the replays that it starts from, whose results stay, and temporary copies."""
        if node in made:
            return made[node]
        own: dict[Node, Node] = {}
        for one in sorted(_needs(node, saved), key=order.__getitem__):
            if one is not node and one in replayed:
                own[one] = replay(one, before)
            elif one is not node and (one in saved or _is_start(one)):
                own[one] = there.get(one, one)
            else:
                if one.op == "get_attr":  # a constant: both halves hold it
                    setattr(split.backward, str(one.target), getattr(split.forward, str(one.target)))
                with graph.inserting_before(before):
                    own[one] = graph.node_copy(one, own.__getitem__)
                own[one].meta["partitioner_tag"] = "is_backward"
        made[node] = own[node]
        return own[node]

    wanted = {there[node]: node for node in replayed}
    for user in list(graph.nodes):
        for taken in user.all_input_nodes:
            if taken in wanted:
                user.replace_input_with(taken, replay(wanted[taken], user))
