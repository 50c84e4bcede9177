"""Nodes of backward: each is told where it begins and ends, by hooks on it.

No mode looks on where gradients are used: under one torch computes some of them by other formulas (``prod(dim=)``,
``linalg.lstsq``), and adds gradients up out of place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from poochplan.torch_private.compiler_internals import is_compiled_backward

from .clock import Clock

Gradients = Sequence[torch.Tensor | None]


class NodeListener:
    """A base. State: whether nodes are told of, and which of them runs; what runs inside of that is part of it."""

    def __init__(self) -> None:
        self._is_on = False
        self._node: Any = None
        self.failure: Exception | None = None
        """What listening has raised. It ends the listening, never the backward, whose gradients are used."""

    def node_begins(self, node: Any, gradients: Gradients) -> None:
        """It is about to run, with these."""

    def node_ends(self, node: Any, gradients: Gradients) -> None:
        """It has run and gives these."""

    def passes_on(self, node: Any, gradients: Gradients) -> None:
        """The same, also of compiled nodes, whose begin and end others tell."""

    @property
    def is_inside(self) -> bool:
        """Whether a node runs."""
        return self._node is not None

    @contextlib.contextmanager
    def told_of(self, outputs: Any) -> Iterator[None]:
        """A block that runs backward from the outputs. Compiled nodes are told of by others.

        Nodes may outlive it, such as those that accumulate: no hook does.
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
        """What nodes do from here on is not looked at."""
        self._is_on, self._node = False, None

    def tell(self, told: Callable[..., None], *args: Any) -> None:
        """Calls it with these, and listens no more where it raises."""
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


def nodes_behind(outputs: Any) -> list[Any]:
    """The nodes that a backward from these may run; an output is a tensor, or an edge of the graph."""
    pending = [_node_of(output) for output in outputs]
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [following for following, _ in node.next_functions]
    return list(seen)


def _node_of(output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        return output.node
    return torch.autograd.graph.get_gradient_edge(output).node if output.requires_grad else None


def name_of(node: Any) -> str:
    """As a profile has it: ``autograd.AddmmBackward0``."""
    return f"autograd.{str(node.name()).rsplit('::', 1)[-1]}"


Stretches = list[tuple[Any, Any]]
"""Marks of a clock: what lies between the two of each pair."""


class NodeClock:
    """How long nodes take, each with what torch does up to the next, such as adding gradients up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self.stretches: Stretches = []
        """Of the node that began last; it may get another one."""

    def begins(self) -> None:
        """A node does."""
        self.stretches = []
        self.goes_on()

    def stops(self) -> None:
        """What follows is not the node's."""
        if self._began is not None:
            self.stretches.append((self._began, self._clock.end()))
            self._began = None

    def goes_on(self) -> None:
        """What follows is the node's, or torch's behind it."""
        self._began = self._clock.begin()

    def forget(self) -> None:
        """What has begun was none: no node came behind it."""
        self._began = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is not the node's."""
        was_on = self._began is not None
        self.stops()
        try:
            yield
        finally:
            if was_on:
                self.goes_on()
