"""Points of the runtime's clock in compiled code, as two ops: deferred unpacks in backwards, save points in forwards.

A save point stands where a graph-mode forward first has a tensor that backward needs. It packs the tensor as autograd
would, with the active hooks, and returns a placeholder, which the backward's deferred unpack fills. So the forward
releases the tensor after its last use, and a plan may swap it. The compiled code must not reuse the memory of a tensor
that it has handed out (``inductor.py`` ensures that).
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx.node import has_side_effect

from poochplan.tensors.operators import traits
from poochplan.tensors.storages import CheckedTensor, Geometry
from poochplan.torch_private.hooks import topmost_hooks
from poochplan.torch_private.tensor_internals import (
    OpOverload,
    detached_alias,
    is_dense,
    schema_of,
    unseen_by_modes,
)

from .deferred_unpack import AtSavePoint, defers, parts_are_measured, placeholder_for, unpack_of

Listener = Callable[[], contextlib.AbstractContextManager[None]]
_LISTENERS: list[tuple[int, Listener]] = []
"""Each listener, with its thread."""
Node = torch.fx.Node
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_EXTERN = ("convolution", "attention")
_SINGLE = 4
"""Kernels compute in numbers of at least this many bytes."""


@contextlib.contextmanager
def told_of_points(around: Listener, device_type: str) -> Iterator[None]:
    """Within the block, ``around()`` is entered around each point of compiled code on this thread.

    It is never entered if the parts of compiled code cannot be measured.
    """
    if not parts_are_measured(device_type):
        yield
        return
    told = threading.get_ident(), around
    _LISTENERS.append(told)
    try:
        yield
    finally:
        _LISTENERS.remove(told)


@contextlib.contextmanager
def _at_a_point() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for thread, listener in _LISTENERS:
            if thread == threading.get_ident():
                stack.enter_context(listener())
        yield


def deferred_unpack(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of a placeholder, at its first use; any other tensor unchanged."""
    unpack = unpack_of(value)
    with _at_a_point() if _LISTENERS else contextlib.nullcontext():
        return value if unpack is None else unpack()


def save(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """A placeholder for the tensor, which our hooks have packed. Without hooks the tensor is held. Hooks of other tools
    get a copy when the forward ends: they may do anything with it, and an op must not return its own input.
    """
    geometry, hooks = Geometry.of(value), topmost_hooks()
    with unseen_by_modes():
        own = detached_alias(value)  # the given one may become a result, which holds the placeholder by its node
    with _at_a_point():
        if hooks is None:
            with unseen_by_modes():
                held = CheckedTensor(own, "a saved tensor of a compiled forward")
            return placeholder_for(geometry, held.given_back, again=True)
        pack, unpack = hooks
        if not defers(pack):
            return _copy_of(value)
        packed = pack(AtSavePoint(own))  # type: ignore[arg-type]
    return placeholder_for(geometry, partial(unpack, packed), again=True)


def _copy_of(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same geometry, even for a view with gaps: the code after it relies on the strides."""
    if not value.numel() or is_dense(value):
        return value.clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = value.as_strided((reach,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride(), 0)


# -- as ops of torch -------------------------------------------------------------------------------------------------


def _unpack_traced(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The op under fake tensors. Placeholders exist there too, but none is traced."""
    return deferred_unpack(value) if type(value) is torch.Tensor else value


def _save_traced(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The op under fake tensors. Its result counts as the same memory, so that no later op of the forward writes into
    it. Torch also calls this with a real tensor after a placeholder; it has no memory.
    """
    if type(value) is torch.Tensor and not value.is_meta:
        return save(value)
    return value.detach()


_LIBRARY = torch.library.Library("poochplan", "FRAGMENT")


def _op(run: Callable[..., torch.Tensor], traced: Callable[..., torch.Tensor], schema: str) -> Any:
    """``run`` as an op of ``torch.ops.poochplan``, under its own name."""
    name = run.__name__
    _LIBRARY.define(name + schema, tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poochplan::{name}", traced, lib=_LIBRARY)
    op = getattr(torch.ops.poochplan, name).default
    has_side_effect(op)
    return op


DEFERRED_UNPACK = _op(deferred_unpack, _unpack_traced, "(Tensor(a) value, Tensor? after=None) -> Tensor(a)")
"""``after`` only states which node it comes after."""
SAVE = _op(save, _save_traced, "(Tensor value, Tensor? after=None) -> Tensor")
"""``after`` is the result of another save point, which it comes after."""


def inputs_of(graph: torch.fx.Graph) -> list[Node]:
    """The inputs of the graph, in order; FX calls these nodes placeholders."""
    return list(graph.find_nodes(op="placeholder"))


def is_gradient(node: Node) -> bool:
    """Whether this input is a gradient that the backward is given."""
    return node.name.startswith("tangents")


def given_by(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """The results of a graph: nodes, numbers and None."""
    (outputs,) = graph.find_nodes(op="output")
    return tuple(outputs.args[0])


def give(graph: torch.fx.Graph, given: tuple[Any, ...]) -> None:
    (outputs,) = graph.find_nodes(op="output")
    outputs.args = (given,)


def is_view(node: Node) -> bool:
    """Whether it takes no memory and lies in that of its input."""
    return isinstance(node.target, OpOverload) and traits(node.target).pure_view


def is_part(node: Node) -> bool:
    """Whether it is one of several results of an op."""
    return node.target is operator.getitem


def views_of(node: Node) -> list[Node]:
    """The node, the node that it is a view of, and so on to one that is no view."""
    chain = [node]
    while is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def base_of(node: Node) -> Node:
    """The node that made the memory in which it lies: itself, or the node that it is a view or a part of."""
    while (is_view(node) or is_part(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers(node: Node) -> Iterator[Node]:
    """The nodes that read it, or a view or a part of it."""
    for user in node.users:
        if is_view(user) or is_part(user):
            yield from readers(user)
        else:
            yield user


def is_extern(node: Node) -> bool:
    """Whether it is never fused: a product, a convolution, attention."""
    if not isinstance(node.target, OpOverload):
        return False
    name = schema_of(node.target).name.rpartition("::")[2]
    return name in _PRODUCTS or any(part in name for part in _EXTERN)


def tells_16_bits(node: Node) -> bool:
    """Whether its value has 16 bits, so that it is rounded where it leaves a kernel and not within one."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < _SINGLE


def rounds_in_kernels(graph: torch.fx.Graph) -> bool:
    """Whether a value in the graph has 16 bits, so that it is rounded where it leaves a kernel and not within one."""
    return any(map(tells_16_bits, graph.nodes))


def writes(node: Node) -> bool:
    """Whether its op writes into its arguments."""
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)
