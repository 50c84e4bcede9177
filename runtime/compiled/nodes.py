"""Nodes of a graph as the compiler takes them: views, ops that no fusion takes up, 16 bits, and who reads whom."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from poochplan.tensors.operators import traits
from poochplan.torch_private.tensor_internals import OpOverload, schema_of

Node = torch.fx.Node
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_EXTERN = ("convolution", "attention")
_SINGLE = 4
"""Bytes of what kernels compute in at least."""


def inputs_of(graph: torch.fx.Graph) -> list[Node]:
    """What the graph is given, in order; FX calls these nodes placeholders."""
    return list(graph.find_nodes(op="placeholder"))


def is_gradient(node: Node) -> bool:
    """Whether it is a gradient that the backward is given; of an input."""
    return node.name.startswith("tangents")


def given_by(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """What a graph returns: nodes, numbers and None."""
    (outputs,) = graph.find_nodes(op="output")
    return tuple(outputs.args[0])


def give(graph: torch.fx.Graph, given: tuple[Any, ...]) -> None:
    """Has it return that."""
    (outputs,) = graph.find_nodes(op="output")
    outputs.args = (given,)


def is_view(node: Node) -> bool:
    """Whether it takes no memory and lies in that of what it reads."""
    return isinstance(node.target, OpOverload) and traits(node.target).pure_view


def is_part(node: Node) -> bool:
    """Whether it is one of several results of an op."""
    return node.target is operator.getitem


def views_of(node: Node) -> list[Node]:
    """The node, and what it is a view of, and so on to what is none."""
    chain = [node]
    while is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def base_of(node: Node) -> Node:
    """What made the memory in which it lies: itself, or what it is a view or a part of."""
    while (is_view(node) or is_part(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers(node: Node) -> Iterator[Node]:
    """Who reads it, or a view or a part of it."""
    for user in node.users:
        if is_view(user) or is_part(user):
            yield from readers(user)
        else:
            yield user


def is_extern(node: Node) -> bool:
    """Whether no fusion takes it up: a product, a convolution, attention."""
    if not isinstance(node.target, OpOverload):
        return False
    name = schema_of(node.target).name.rpartition("::")[2]
    return name in _PRODUCTS or any(part in name for part in _EXTERN)


def tells_16_bits(node: Node) -> bool:
    """Whether it is rounded where it leaves a kernel, and not within."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < _SINGLE


def rounds_in_kernels(graph: torch.fx.Graph) -> bool:
    """Whether anything in it is told in 16 bits: rounded where it leaves a kernel, and not within."""
    return any(map(tells_16_bits, graph.nodes))


def writes(node: Node) -> bool:
    """Whether its op writes into what it is given."""
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)
