"""Calls of compiled callables in a capture, each one op, and each compiled backward another op. With save points or
deferred unpacks, each part between two of them is one op.

No dispatch mode looks inside: their memory is measured at the allocator, or read from the step's log.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from poochplan.formats.queries import COMPILED_REGION
from poochplan.profiler.capture.node_ops import Noting, around_backward
from poochplan.profiler.capture.op_blocks import Taker
from poochplan.tensors.storages import is_plain
from poochplan.torch_private.tensor_internals import last_sequence_number, pytree, version_of

from .captured import CapturedOp


class CallPart(NamedTuple):
    """A stretch of compiled code, up to a save point, a deferred unpack or the end."""

    op: CapturedOp
    number: int
    """Number of the op."""
    first_block: int
    """Its blocks have this number or a higher one."""


@dataclass
class Half:
    """A compiled forward or backward that runs."""

    is_backward: bool
    parts: list[CallPart] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class CompiledCalls:
    """State: the values that the running compiled code has saved, and the bytes that a compiled backward has freed."""

    def __init__(self, capture: Noting) -> None:
        self._capture, self._workspace = capture, capture.workspace
        self._meter = capture.workspace.compiled_meter()
        self._running: list[CapturedOp] = []
        """More than one can run: a checkpoint runs a compiled forward again within a compiled backward."""
        self._forward, self._backward = Half(is_backward=False), Half(is_backward=True)
        """They have no parts while none runs."""
        self._saves_now = False
        self._freed_bytes = 0
        """Bytes of the values whose last hold has ended since a part of a compiled backward began."""
        self._saved: list[torch.UntypedStorage] | None = None
        """Held until the running compiled code ends, as autograd would hold it; None outside one."""
        self.unmeasured = 0
        """Number of runs of compiled code whose memory is unknown."""

    @property
    def is_running(self) -> bool:
        return self._saved is not None

    def saves(self, storage: torch.UntypedStorage) -> None:
        """A tensor is saved. At a save point the forward releases it itself."""
        if self._saved is not None and not self._saves_now:
            self._saved.append(storage)

    def bearer_of(self, storage: torch.UntypedStorage) -> CallPart | None:
        """The part of the running compiled forward that took the storage; None outside one."""
        return self._part_with(self._forward.parts, storage) if self._forward.parts else None

    def _part_with(self, parts: list[CallPart], storage: torch.UntypedStorage) -> CallPart:
        block = self._workspace.block_of(storage)
        return parts[max(0, bisect_right(parts, block, key=lambda part: part.first_block) - 1)]

    def freed(self, size_bytes: int, rounded_bytes: int, born: int) -> None:
        """The last hold has ended of a value that is an output of op number ``born``."""
        self._freed_bytes += rounded_bytes
        self._meter.freed(size_bytes)
        if self._running and not (self.is_running and born == len(self._capture.ops) - 1):
            self._workspace.freed(size_bytes)

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        """A block whose allocations do not belong to the compiled code."""
        return self._meter.set_aside()

    def around(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            capture = self._capture
            capture.look_for_checkpoint(path)
            op = self._new_op(path)
            leaves = pytree.tree_leaves((args, kwargs))
            op.inputs = list(dict.fromkeys(map(capture.value_of, capture.ordinary(leaves))))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor) and is_plain(x, capture.device_type)]
            before = [(tensor, version_of(tensor)) for tensor in tensors]
            node_before = last_sequence_number()
            with capture.away():
                outputs, taken_bytes, parts = self._run(op, call, args, kwargs)
            written = capture.written([tensor for tensor, version in before if version_of(tensor) != version])
            parts[-1].op.writes = written
            for tensor in capture.ordinary(pytree.tree_leaves(outputs)):
                part = self._part_with(parts, tensor.untyped_storage())
                capture.bear(part.op, [tensor], part.number)
            capture.took_inside(op, taken_bytes)
            around_backward(outputs, node_before, partial(self._backward_begins, path), self._backward_ran)
            return outputs

        return compiled

    def _new_op(self, path: str) -> CapturedOp:
        op = CapturedOp(COMPILED_REGION, path, self._capture.phase)
        op.opaque = True
        return op

    def _run(
        self, op: CapturedOp, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, int | None, list[CallPart]]:
        """Returns the result, the memory, and the parts of a call, of which ``op`` is the first."""
        self._saved = []
        outer, self._forward = self._forward, Half(is_backward=False)
        self._part_begins(self._forward, op)
        try:
            outputs = call(*args, **kwargs)
        finally:
            taken_bytes = self._part_ends(self._forward)[1]
            parts, self._saved, self._forward = self._forward.parts, None, outer
        return outputs, taken_bytes, parts

    def _part_begins(self, half: Half, op: CapturedOp) -> None:
        half.parts.append(CallPart(op, len(self._capture.ops), self._workspace.next_block()))
        if half.is_backward:
            self._freed_bytes = 0
        else:
            self._capture.ops.append(op)  # before it runs, so that its values are created before they are saved
        self._running.append(op)
        self._workspace.begin()
        self._meter.begin()
        if half.is_backward:
            half.stack.enter_context(self._capture.unseen())
        half.stack.enter_context(self._capture.timed(op))

    def _part_ends(self, half: Half, *, others_follow: bool = False) -> tuple[CapturedOp, int | None]:
        """Ends a part: records its op and its memory."""
        assert self._running, "compiled code ends that has not begun"
        half.stack.close()
        taken_bytes, op = self._meter.end(), self._running.pop()
        self._workspace.end(op, Taker.BACKWARD if half.is_backward else Taker.FORWARD, is_part=others_follow)
        self.unmeasured += taken_bytes is None
        return op, taken_bytes

    @contextlib.contextmanager
    def point(self) -> Iterator[None]:
        """A block in which compiled code saves or gets a tensor. One part ends before it, and the next begins."""
        if self.is_running:
            self._part_ends(self._forward, others_follow=True)
            self._saves_now = True
            try:
                yield
            finally:  # also if it raises, because the forward's caller ends a part
                self._saves_now = False
                self._part_begins(self._forward, self._new_op(self._forward.parts[0].op.layer))
        elif self._backward.parts:
            op, _ = self._part_ends(self._backward, others_follow=True)
            self._capture.ops.append(op)
            try:
                yield
            except BaseException:
                self._backward.parts.clear()  # this backward has ended
                raise
            self._part_begins(self._backward, self._new_op(op.layer))
        else:
            yield

    def _backward_begins(self, path: str, gradients: list[torch.Tensor]) -> None:
        self._capture.nodes.gradients_arrive(gradients)
        self._backward.parts.clear()
        self._part_begins(self._backward, self._new_op(path))

    def _backward_ran(self, gradients: list[torch.Tensor]) -> None:
        capture = self._capture
        op, taken_bytes = self._part_ends(self._backward)
        for gradient in capture.ordinary(gradients):
            part = self._part_with(self._backward.parts, gradient.untyped_storage())
            capture.bear(part.op, [gradient], part.number)
        self._backward.parts.clear()
        # Values that died in it are not live at the op, which comes after all its unpacks.
        capture.took_inside(op, taken_bytes, self._freed_bytes)
        capture.ops.append(op)
