"""Nodes of backward: hooks on each node report its beginning and end.

No mode observes a backward whose gradients are used. Under a mode torch computes some gradients by other formulas
(``prod(dim=)``, ``linalg.lstsq``), and does not add gradients in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from poochplan.torch_private.compiler_internals import is_compiled_backward
from poochplan.torch_private.tensor_internals import nodes_behind, tensors_in

from .clock import Clock

Gradients = Sequence[torch.Tensor | None]


class NodeListener:
    """Base class. State: whether nodes are observed, and which of them runs; code inside a node is part of it."""

    def __init__(self) -> None:
        self._is_on = False
        self._node: Any = None
        self.failure: Exception | None = None
        """The exception raised while listening. It ends the listening and never the backward, whose gradients are
        used.
        """

    def node_begins(self, node: Any, gradients: Gradients) -> None:
        """A node is about to run, with these gradients."""

    def node_ends(self, node: Any, gradients: Gradients) -> None:
        """A node has run and returns these gradients."""

    def passes_on(self, node: Any, gradients: Gradients) -> None:
        """The same, also for compiled nodes, whose begin and end other code reports."""

    @property
    def is_inside(self) -> bool:
        return self._node is not None

    @contextlib.contextmanager
    def told_of(self, outputs: Any) -> Iterator[None]:
        """A block that runs a backward from the outputs with hooks on its nodes. Other code reports compiled nodes.

        Nodes such as those that accumulate may outlive the block; no hook does.
        """
        handles = []
        self._is_on = True
        try:
            for node in nodes_behind(outputs):
                if is_compiled_backward(node):
                    handles.append(node.register_hook(partial(self._passes, node)))
                else:
                    handles.append(node.register_prehook(partial(self._begins, node)))
                    handles.append(node.register_hook(partial(self._ends, node)))
            yield
        finally:
            self.leave()
            for handle in handles:
                handle.remove()

    def leave(self) -> None:
        """Nodes are no longer observed."""
        self._is_on, self._node = False, None

    def tell(self, told: Callable[..., None], *args: Any) -> None:
        """Calls the listener with these arguments. If it raises, listening ends."""
        try:
            told(*args)
        except Exception as error:
            self._is_on, self._node, self.failure = False, None, error

    def _begins(self, node: Any, gradients: Gradients) -> None:
        if self._is_on and self._node is None:
            self._node = node
            self.tell(self.node_begins, node, gradients)

    def _ends(self, node: Any, gradients: Gradients, _: Gradients) -> None:
        if self._node is node:
            self._node = None
            self.tell(self.node_ends, node, gradients)
            self._passes(node, gradients)

    def _passes(self, node: Any, gradients: Gradients, _: Gradients = ()) -> None:
        if self._is_on:
            self.tell(self.passes_on, node, gradients)


def around_backward(
    outputs: Any,
    node_before: int,
    begins: Callable[[list[torch.Tensor]], Any],
    ends: Callable[[list[torch.Tensor]], Any],
) -> None:
    """Calls ``begins(gradients)`` before each backward of the code that a call has just compiled, with its input
    gradients, and ``ends(gradients)`` after it, with its results.

    ``outputs`` are the call's; ``node_before`` is the number of the last autograd node that was made before it.
    """
    tensors = [one for one in tensors_in(outputs) if one.grad_fn is not None]
    for node in filter(is_compiled_backward, nodes_behind(tensors, node_before)):
        node.register_prehook(lambda gradients: begins([one for one in gradients if one is not None]))
        node.register_hook(lambda gradients, _: ends([one for one in gradients if one is not None]))


def name_of(node: Any) -> str:
    """The node's name in a profile: ``autograd.AddmmBackward0``."""
    return f"autograd.{str(node.name()).rsplit('::', 1)[-1]}"


Stretches = list[tuple[Any, Any]]
"""Pairs of clock marks; each pair delimits a stretch of time."""


class NodeClock:
    """Times of nodes. A node's time includes torch's work up to the next node, such as adding gradients."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self.stretches: Stretches = []
        """Stretches of the node that began last; it may get another one."""

    def begins(self) -> None:
        self.stretches = []
        self.goes_on()

    def stops(self) -> None:
        """The following code does not belong to the node."""
        if self._began is not None:
            self.stretches.append((self._began, self._clock.end()))
            self._began = None

    def goes_on(self) -> None:
        """The following code belongs to the node, or is torch's own after it."""
        self._began = self._clock.begin()

    def forget(self) -> None:
        """Discards the last begin, because no node followed it."""
        self._began = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that does not belong to the node."""
        was_on = self._began is not None
        self.stops()
        try:
            yield
        finally:
            if was_on:
                self.goes_on()
