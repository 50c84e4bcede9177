"""The memory that an op takes and gives back inside, and the blocks that it leaves, from the device's allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from poochplan.formats.profile import Memory
from poochplan.runtime.arena.library import BIRTH, DEATH, AllocationLog, ThreadScope
from poochplan.runtime.devices.backend import backend_of
from poochplan.runtime.devices.high_water import high_water
from poochplan.runtime.metering.allocated import aside, joined_count, step_scope
from poochplan.runtime.metering.device_peak import CpuMeter
from poochplan.torch_private.cuda_internals import can_trace_memory, memory_trace, request_block, trace_memory

from .captured import CapturedOp
from .op_blocks import (
    BEGINS,
    ENDS,
    POINT,
    LogEvent,
    Stray,
    Taker,
    bytes_beside_ops,
    carried_in,
    events_by_op,
    events_of_trace,
    strays_in,
    taken_in,
)

ALLOCATED = "allocated_bytes"
"""The statistic of an allocator that is read."""
MARK_BYTES = 61
"""A request that no op is likely to make."""


class CompiledMeter:
    """Bytes that compiled code takes, without copies that the capture makes meanwhile. This class itself leaves them to
    the step's log, which is read after the step has ended.
    """

    def begin(self) -> None:
        """Before the code."""

    def end(self) -> int | None:
        """Most bytes above those live at its beginning; None if unknown."""
        return 0

    def freed(self, size_bytes: int) -> None:
        """A storage of that size dies."""

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        """A block whose allocations do not belong to the code."""
        return aside()


class AllocatorMeter(CompiledMeter):
    """The caching allocator's peak since the code began."""

    def __init__(self, where: torch.device) -> None:
        self._index, self._marks = backend_of(where).index, high_water(where.type)
        self._begin_bytes = self._aside_bytes = self._most_bytes = 0

    def begin(self) -> None:
        self._begin_bytes, self._aside_bytes, self._most_bytes = self._marks.of_part(self._index, ALLOCATED)[0], 0, 0
        self._marks.begin_part(self._index)

    def end(self) -> int:
        self._look()
        return self._most_bytes

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        before_bytes = self._look()
        yield
        self._aside_bytes += self._marks.of_part(self._index, ALLOCATED)[0] - before_bytes
        self._marks.begin_part(self._index)

    def _look(self) -> int:
        now_bytes, peak_bytes = self._marks.of_part(self._index, ALLOCATED)
        self._most_bytes = max(self._most_bytes, peak_bytes - self._begin_bytes - self._aside_bytes)
        return now_bytes


class Workspace:
    """This class itself is for a CPU without the compiled allocator, and steps without memory."""

    memory = Memory.LIVE
    """Whether it knows the memory inside ops."""
    strays: Sequence[Stray] = ()
    """Memory taken between ops that is no value, such as the generator states of a checkpoint."""

    def __init__(self, compiled_meter: Callable[[], CompiledMeter | CpuMeter] = CompiledMeter) -> None:
        self.compiled_meter = compiled_meter

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A block whose ops are measured; after it their blocks are known."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Before an op, compiled code or its backward."""

    def end(self, op: CapturedOp, taker: Taker = Taker.OP, *, is_part: bool = False) -> None:
        """After it, while its outputs live: records an op's workspace. ``is_part``: others of compiled code follow."""

    def freed(self, size_bytes: int) -> None:
        """The last hold of a value ends in compiled code that has not made it."""

    def passes_point(self) -> None:
        """A point of the runtime's clock has been passed."""

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        """That output of the op lies in the block."""

    def knows(self, storage: torch.UntypedStorage) -> None:
        """A value lies in the block."""

    def next_block(self) -> int:
        """Number of the next block; numbers ascend."""
        return 0

    def block_of(self, storage: torch.UntypedStorage) -> int:
        """Number of the block in which the tensor lies."""
        return 0


class AllocatorWorkspace(Workspace):
    """The caching allocator's peak during the op, minus the memory allocated after it."""

    memory = Memory.ALLOCATED

    def __init__(self, where: torch.device) -> None:
        self._index, self._marks = backend_of(where).index, high_water(where.type)
        super().__init__(partial(AllocatorMeter, where))

    def begin(self) -> None:
        self._marks.begin_part(self._index)

    def end(self, op: CapturedOp, taker: Taker = Taker.OP, *, is_part: bool = False) -> None:
        if taker is Taker.OP:
            now_bytes, peak_bytes = self._marks.of_part(self._index, ALLOCATED)
            op.workspace_bytes = peak_bytes - now_bytes


class TracedWorkspace(AllocatorWorkspace):
    """The same with the blocks of each op, from the trace that the caching allocator of a GPU writes.

    A mark is a request of ``MARK_BYTES``, which is given back at once. If the trace has more or fewer requests of that
    size than marks were made, no op's blocks are known.
    """

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._is_on = False
        self._marks_made: list[int | tuple[int, int]] = []
        """In their order: what is marked, or the address of a block and the output that lies in it."""
        self._ops: list[CapturedOp | None] = []
        """None for compiled code, and for nodes that only hooks observe."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        trace_memory(is_on=True)
        self._is_on = True
        try:
            yield
            self._read(memory_trace(self._index))
        finally:
            self._is_on = False
            trace_memory(is_on=False)

    def begin(self) -> None:
        self._mark(BEGINS)
        super().begin()

    def end(self, op: CapturedOp, taker: Taker = Taker.OP, *, is_part: bool = False) -> None:
        super().end(op, taker, is_part=is_part)
        if self._is_on:
            self._mark(ENDS)
            self._ops.append(op if taker is Taker.OP else None)

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self._mark((storage.data_ptr(), output))

    def _mark(self, what: int | tuple[int, int]) -> None:
        if self._is_on:
            self._marks_made.append(what)
            request_block(MARK_BYTES, self._index)

    def _read(self, trace: list[tuple[str, int, int]]) -> None:
        read = events_of_trace(trace, self._marks_made, MARK_BYTES)
        if read is None:
            return
        events, outputs = read
        for op, own in zip(self._ops, events_by_op(events), strict=True):
            if op is not None:
                op.blocks = taken_in(own, outputs, len(op.outputs)).blocks


class LoggedWorkspace(Workspace):
    """The compiled allocator's log of the step's blocks, with marks before and after ops, and after points."""

    memory = Memory.ALLOCATED

    def __init__(self, scope: ThreadScope) -> None:
        super().__init__()
        self._scope = scope
        self._log: AllocationLog | None = None
        self._ops: list[CapturedOp] = []
        self._takers: list[tuple[Taker, bool]] = []
        self._outputs: dict[int, int] = {}
        """By block: index of the op's output that lies in it."""
        self._known: set[int] = set()
        """Blocks in which values lie."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        joined_count()
        log, first = AllocationLog(self._scope), self._scope.library.next_block()
        with log:
            self._log = log
            try:
                yield
            finally:
                self._log = None
        # Deaths of blocks that the scope's other threads made meanwhile are left out: their births are not logged.
        kind, block = log.events["kind"], log.events["block"]
        is_other = (kind == DEATH) & (block >= first) & ~np.isin(block, block[kind == BIRTH])
        self._read(log.events[~is_other].tolist())

    def begin(self) -> None:
        self._mark(BEGINS)

    def end(self, op: CapturedOp, taker: Taker = Taker.OP, *, is_part: bool = False) -> None:
        if self._log is not None:
            self._log.mark(ENDS)
            self._ops.append(op)
            self._takers.append((taker, is_part))

    def freed(self, size_bytes: int) -> None:
        if size_bytes:
            self._mark(-size_bytes)

    def passes_point(self) -> None:
        self._mark(POINT)

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        block = self.block_of(storage)
        if block >= 0:
            self._outputs[block] = output

    def knows(self, storage: torch.UntypedStorage) -> None:
        self._known.add(self.block_of(storage))

    def next_block(self) -> int:
        return self._scope.library.next_block()

    def block_of(self, storage: torch.UntypedStorage) -> int:
        return self._scope.library.block_at(storage.data_ptr())

    def _mark(self, value: int) -> None:
        if self._log is not None:
            self._log.mark(value)

    def _read(self, events: list[LogEvent]) -> None:
        events_of, carried = carried_in(events_by_op(events), self._takers, self._outputs)
        for one in carried:
            op = self._ops[one.made_in]
            self._outputs[one.block] = len(op.outputs) + len(op.carried)
            op.carried.append((one.size_bytes, self._ops[one.let_go_in]))
        for op, (taker, _), own in zip(self._ops, self._takers, events_of, strict=True):
            output_count = len(op.outputs) + len(op.carried)
            op.blocks, op.workspace_bytes = taken_in(own, self._outputs, output_count, taker)
        self.strays = strays_in(events, self._known)
        for number, size_bytes in bytes_beside_ops(self.strays).items():
            if 0 <= number < len(self._ops):
                op = self._ops[number]
                op.workspace_bytes = max(op.workspace_bytes, size_bytes)


def workspace_of(where: torch.device) -> Workspace:
    if where.type != "cpu":
        is_traced = where.type == "cuda" and can_trace_memory()
        return TracedWorkspace(where) if is_traced else AllocatorWorkspace(where)
    scope = step_scope()
    return Workspace(CpuMeter) if scope is None or joined_count() is None else LoggedWorkspace(scope)
