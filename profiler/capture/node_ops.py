"""NodeOps: the nodes of a backward as ops of a capture, one op each; hooks on each node report its beginning and end.

No mode observes a backward whose gradients are used. Under a mode torch computes some gradients by other formulas
(``prod(dim=)``, ``linalg.lstsq``), and does not add gradients in place.

Torch writes the sum of several gradients for one place into the first of them if nothing else holds its memory, as a
view's base does, and otherwise into new memory. A capture that has looked at a gradient's storage holds it, so all sums
are new. The sums that torch makes without a capture are therefore derived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from poochplan.formats.profile import Phase
from poochplan.formats.profile_parts import rounded_up
from poochplan.guard import guard_here, guarded
from poochplan.profiler.capture.op_blocks import Taker
from poochplan.profiler.capture.workspace import Workspace
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.runtime.metering.census import census
from poochplan.tensors.storages import bytes_of, gradient_of
from poochplan.torch_private.compiler_internals import is_compiled_backward
from poochplan.torch_private.tensor_internals import is_dense, is_view, last_sequence_number, nodes_behind, tensors_in

from .captured import CapturedOp, Lifetimes, shapes_of
from .clock import Clock

Gradients = Sequence[torch.Tensor | None]
Edge = tuple[Any, int]
"""The node that gets a gradient, and the place in it."""
Stretches = list[tuple[Any, Any]]
"""Pairs of clock marks; each pair delimits a stretch of time."""


class Noting(Protocol):
    """What compiled calls and nodes of a backward report to a capture, and ask of it."""

    device_type: str
    model: torch.nn.Module
    workspace: Workspace
    clock: Clock
    tracker: LayerTracker
    phase: Phase
    ops: list[CapturedOp]
    lifetimes: Lifetimes
    sees_values: bool
    nodes: NodeOps

    def look_for_checkpoint(self, compiled: str | None = None) -> None: ...
    def ordinary(self, leaves: list[Any]) -> list[torch.Tensor]: ...
    def value_of(self, tensor: torch.Tensor) -> int: ...
    def written(self, tensors: list[torch.Tensor]) -> list[int]: ...
    def bear(self, op: CapturedOp, leaves: list[Any], born: int) -> None: ...
    def arise(self, tensor: torch.Tensor, behind: int = -1) -> None: ...
    def took_inside(self, op: CapturedOp, taken_bytes: int | None, freed_bytes: int = 0) -> None: ...
    def away(self) -> contextlib.AbstractContextManager[None]: ...
    def unseen(self) -> contextlib.AbstractContextManager[None]: ...
    def timed(self, op: CapturedOp) -> contextlib.AbstractContextManager[None]: ...
    def took(self, op: CapturedOp, stretches: Stretches) -> None: ...


class NodeOps:
    """State: whether nodes are observed, which of them runs, and its op; and whether one has run in this backward. Code
    inside a node is part of it.
    """

    def __init__(self, capture: Noting) -> None:
        self.failure: Exception | None = None
        """The exception raised while listening, where no guard stands. It ends the listening and never the backward,
        whose gradients are used.
        """
        self._is_on = False
        self._node: Any = None
        self._capture, self._workspace = capture, capture.workspace
        self._meter, self._clock = capture.workspace.compiled_meter(), NodeClock(capture.clock)
        self._op: CapturedOp | None = None
        self._has_run = False
        self._freed_bytes = 0
        self._first_block = self._nodes_before = 0
        self._ran_another = False
        self._sums: dict[Edge, Pending] = {}

    @property
    def is_inside(self) -> bool:
        return self._node is not None

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``run()``, a backward from the outputs, under hooks on its nodes. Other code reports compiled
        nodes. Nodes such as those that accumulate may outlive the backward; no hook does.
        """
        self._has_run, handles = False, []
        self._is_on = True
        try:
            for node in nodes_behind(outputs):
                if is_compiled_backward(node):
                    handles.append(node.register_hook(guarded(partial(self._passes, node))))
                else:
                    handles.append(node.register_prehook(guarded(partial(self._begins, node))))
                    handles.append(node.register_hook(guarded(partial(self._ends, node))))
            results = run()
            if self.failure is None:
                self._tell(self.gradients_arrive, tensors_in(results))
            return results
        finally:
            self.leave()
            for handle in handles:
                handle.remove()

    def _tell(self, told: Callable[..., None], *args: Any) -> None:
        """Calls that with these arguments. If it raises, listening ends; a guard, if there is one, is told."""
        try:
            told(*args)
        except Exception as error:
            self._is_on, self._node, self.failure = False, None, error
            if guard_here() is not None:
                raise

    def _begins(self, node: Any, gradients: Gradients) -> None:
        if self._is_on and self._node is None:
            self._node = node
            self._tell(self.node_begins, node, gradients)

    def _ends(self, node: Any, gradients: Gradients, _: Gradients) -> None:
        if self._node is node:
            self._node = None
            self._tell(self.node_ends, node, gradients)
            self._passes(node, gradients)

    def _passes(self, node: Any, gradients: Gradients, _: Gradients = ()) -> None:
        if self._is_on:
            self._tell(self.passes_on, node, gradients)

    def leave(self) -> None:
        """Nodes are no longer observed. In the middle of a node, for example when it raises, that is no op."""
        if self._op is not None:
            self._meter.end()
            self._workspace.end(self._op, Taker.BACKWARD)
            self._op = None
        self._clock.forget()
        self._sums.clear()
        self._is_on, self._node = False, None

    def runs_another(self) -> None:
        """A backward begins within the node that runs."""
        self._ran_another = True

    def gradients_arrive(self, gradients: Gradients, node: Any = None) -> None:
        """The node is about to use these. New ones are sums of several gradients, or of a hook between nodes."""
        self._clock.stops()
        for place, gradient in enumerate(gradients):
            pending = self._sums.pop((node, place), None)
            if gradient is None or not self._has_run:
                continue
            if pending is not None and pending.own is not None:
                for part in self._capture.ordinary([gradient]):  # the first gradient's value goes on in the sum
                    if self._capture.lifetimes.find(part) < 0:
                        self._workspace.knows(part.untyped_storage())
                        self._capture.lifetimes.stands_in(part.untyped_storage(), pending.own)
            self._capture.arise(gradient, -1 if pending is None else pending.made_behind)
        self._has_run = True

    def passes_on(self, node: Any, gradients: Gradients) -> None:
        """A node, also a compiled one, has run and returns these gradients."""
        for gradient, edge in zip(gradients, node.next_functions, strict=False):
            parts = [] if gradient is None else self._capture.ordinary([gradient])
            if gradient is not None and parts:
                number = self._capture.lifetimes.find(parts[0])
                self._adds(edge, number, takes_sum=is_dense(gradient) and not is_view(gradient))

    def _adds(self, edge: Edge, number: int, *, takes_sum: bool) -> None:
        """The value of that number is added to what waits there."""
        pending = self._sums.get(edge)
        if edge[0] is None or pending is None:
            self._sums[edge] = Pending(number, takes_sum)
        elif pending.own is None and pending.made_behind < 0:
            holders = [number, *(one.number for one in self._sums.values())].count(pending.number)
            if pending.takes_sum and holders == 1:
                pending.own = self._capture.lifetimes.storage_of(pending.number)
            if pending.own is None:
                pending.made_behind = len(self._capture.ops) - 1

    def node_begins(self, node: Any, gradients: Gradients) -> None:
        self.gradients_arrive(gradients, node)
        capture = self._capture
        op = self._op = CapturedOp(name_of(node.name()), capture.tracker.layer_of(node), Phase.BACKWARD)
        op.opaque = True
        op.inputs = list(dict.fromkeys(map(capture.value_of, capture.ordinary(list(gradients)))))
        self._ran_another, self._nodes_before = False, last_sequence_number()
        self._freed_bytes, self._first_block = 0, self._workspace.next_block()
        self._workspace.begin()
        self._meter.begin()
        self._clock.begins()

    def node_ends(self, node: Any, gradients: Gradients) -> None:
        self._clock.stops()
        op, self._op = self._op, None
        assert op is not None, "a node ends that has not begun"
        taken_bytes = self._meter.end()
        self._workspace.end(op, Taker.BACKWARD)
        capture = self._capture
        leaf = getattr(node, "variable", None)
        accumulated = gradient_of(leaf) if isinstance(leaf, torch.Tensor) else None
        born = len(capture.ops)
        capture.ops.append(op)  # first, because what it leaves may die at once, as the buffer of a collective does
        capture.bear(op, [*gradients, accumulated], born)
        if capture.sees_values and (self._ran_another or last_sequence_number() != self._nodes_before):
            capture.bear(op, self._left_behind(), born)
        op.shapes = shapes_of(gradients)
        capture.took_inside(op, taken_bytes, self._freed_bytes)
        capture.took(op, self._clock.stretches)
        self._clock.goes_on()

    def _left_behind(self) -> list[torch.Tensor]:
        """Values left by a forward that ran again within the node, as with checkpoints, or by a backward within it."""
        there = census(self._capture.device_type, 1).values()
        made = [one for one in there if self._workspace.block_of(one) >= self._first_block]
        gradients = map(gradient_of, self._capture.model.parameters())
        return [*map(bytes_of, made), *(one for one in gradients if one is not None)]

    def reads(self, number: int) -> None:
        if self._op is not None and number not in self._op.inputs:
            self._op.inputs.append(number)

    def freed(self, size_bytes: int) -> None:
        if self._op is not None:
            self._freed_bytes += rounded_up(size_bytes)
            self._meter.freed(size_bytes)
            self._workspace.freed(size_bytes)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block that does not belong to the node."""
        with self._clock.paused(), self._meter.set_aside():
            yield


@dataclass
class Pending:
    """The gradient that waits for a node in one place."""

    number: int
    """The value that came first; -1 for none."""
    takes_sum: bool
    """Whether torch may write the sum into it: it is dense and no view, since a view's base holds the memory too."""
    own: torch.UntypedStorage | None = None
    """The value of the first gradient, into which the sum is written."""
    made_behind: int = -1
    """The op after which the sum was made; -1 if there is none, or if it is no new value."""


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
        node.register_prehook(guarded(lambda gradients: begins([one for one in gradients if one is not None])))
        node.register_hook(guarded(lambda gradients, _: ends([one for one in gradients if one is not None])))


def name_of(node: str) -> str:
    """The name in a profile of the node that torch calls so: ``autograd.AddmmBackward0``."""
    return f"{_OF_NODES}{node.rsplit('::', 1)[-1]}"


def is_node(name: str) -> bool:
    """Whether an op of that name is a node of a backward."""
    return name.startswith(_OF_NODES)


_OF_NODES = "autograd."


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
