"""NodeOps: the nodes of a backward as ops of a capture, one op each.

Torch writes the sum of several gradients for one place into the first of them if nothing else holds its memory, as a
view's base does, and otherwise into new memory. A capture that has looked at a gradient's storage holds it, so all sums
are new. The sums that torch makes without a capture are therefore derived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from poochplan.formats.profile import Phase
from poochplan.formats.profile_parts import rounded_up
from poochplan.profiler.capture.op_blocks import Taker
from poochplan.runtime.metering.census import census
from poochplan.tensors.storages import bytes_of
from poochplan.torch_private.tensor_internals import is_dense, is_view, last_sequence_number, tensors_in

from .captured import CapturedOp, Lifetimes, shapes_of
from .compiled_calls import Noting
from .node_hooks import Gradients, NodeClock, NodeListener, name_of

Edge = tuple[Any, int]
"""The node that gets a gradient, and the place in it."""


class NodeOps(NodeListener):
    """State: the op of the running node, and whether a node has run in this backward."""

    def __init__(self, capture: Noting) -> None:
        super().__init__()
        self._capture, self._workspace = capture, capture.workspace
        self._meter, self._clock = capture.workspace.compiled_meter(), NodeClock(capture.clock)
        self._op: CapturedOp | None = None
        self._has_run = False
        self._freed_bytes = 0
        self._first_block = self._nodes_before = 0
        self._ran_another = False
        self._sums = Sums(capture.lifetimes)

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        self._has_run = False
        with self.told_of(outputs):
            results = run()
            if self.failure is None:
                self.tell(self.gradients_arrive, tensors_in(results))
        return results

    def leave(self) -> None:
        """Also called in the middle of a node, for example when it raises: then it is no op."""
        if self._op is not None:
            self._meter.end()
            self._workspace.end(self._op, Taker.BACKWARD_COMPILED)
            self._op = None
        self._clock.forget()
        self._sums.clear()
        super().leave()

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
                    if self._capture.value_if_known(part) < 0:
                        self._workspace.knows(part.untyped_storage())
                        self._capture.lifetimes.stands_in(part.untyped_storage(), pending.own)
            self._capture.arise(gradient, -1 if pending is None else pending.made_behind)
        self._has_run = True

    def passes_on(self, node: Any, gradients: Gradients) -> None:
        for gradient, edge in zip(gradients, node.next_functions, strict=False):
            parts = [] if gradient is None else self._capture.ordinary([gradient])
            if gradient is not None and parts:
                number = self._capture.value_if_known(parts[0])
                takes_sum = is_dense(gradient) and not is_view(gradient)
                self._sums.adds(edge, number, len(self._capture.ops) - 1, takes_sum=takes_sum)

    def node_begins(self, node: Any, gradients: Gradients) -> None:
        self.gradients_arrive(gradients, node)
        capture = self._capture
        op = self._op = CapturedOp(name_of(node), capture.tracker.layer_of(node), Phase.BACKWARD)
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
        self._workspace.end(op, Taker.BACKWARD_COMPILED)
        capture = self._capture
        leaf = getattr(node, "variable", None)
        accumulated = leaf.grad if isinstance(leaf, torch.Tensor) else None
        born = len(capture.ops)
        capture.ops.append(op)  # first, because what it leaves may die at once, as the buffer of a collective does
        capture.bear(op, [*gradients, accumulated], born)
        if self._ran_another or last_sequence_number() != self._nodes_before:
            capture.bear(op, self._left_behind(), born)
        op.shapes = shapes_of(gradients)
        if taken_bytes is not None:
            op.workspace_bytes = max(0, taken_bytes - sum(map(capture.rounded_bytes, op.outputs)) + self._freed_bytes)
        capture.took(op, self._clock.stretches)
        self._clock.goes_on()

    def _left_behind(self) -> list[torch.Tensor]:
        """Values left by a forward that ran again within the node, as with checkpoints, or by a backward within it."""
        there = census(self._capture.device_type, 1).values()
        made = [one for one in there if self._workspace.block_of(one) >= self._first_block]
        gradients = (parameter.grad for parameter in self._capture.model.parameters())
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


class Sums(dict[Edge, Pending]):
    """Pending sums by their place."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__()
        self._lifetimes = lifetimes

    def adds(self, edge: Edge, number: int, behind: int, *, takes_sum: bool) -> None:
        pending = self.get(edge)
        if edge[0] is None or pending is None:
            self[edge] = Pending(number, takes_sum)
        elif pending.own is None and pending.made_behind < 0:
            holders = [number, *(one.number for one in self.values())].count(pending.number)
            if pending.takes_sum and holders == 1:
                pending.own = self._lifetimes.storage_of(pending.number)
            if pending.own is None:
                pending.made_behind = behind
