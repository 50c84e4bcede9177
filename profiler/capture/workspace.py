"""What an op takes and gives back inside, and which blocks it leaves behind, as the device's allocator tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from poochplan.formats.profile import Memory, OpBlock
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, MARK, AllocationLog, Table
from poochplan.runtime.allocator.counting import ByteCount
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.metering.allocated import joined_count, step_scope

from .captured import CapturedOp

LEAST_BYTES = 4096
"""What an op takes that is smaller, and none of its outputs, is in no list of blocks: a scalar that became a tensor."""


class Workspace(Protocol):
    """State: of CPUs, the log of the step."""

    memory: Memory
    """Whether it knows what ops take."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A block whose ops are asked about; behind it their blocks are known."""

    def begin(self) -> None:
        """Before an op."""

    def end(self, op: CapturedOp) -> None:
        """Behind it, while its outputs live: notes its workspace."""

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        """An output of the op that was told last lies there."""


class NoWorkspace:
    """Of a CPU without the compiled allocator, and of steps without memory."""

    memory = Memory.LIVE

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Nothing to do."""

    def end(self, op: CapturedOp) -> None:
        """Nothing is known."""

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        """Nothing to do."""


class CudaWorkspace:
    """The caching allocator's peak during the op, less what is allocated behind it."""

    memory = Memory.ALLOCATED

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._where)

    def end(self, op: CapturedOp) -> None:
        taken = torch.cuda.memory_stats(self._where)
        op.workspace_bytes = int(taken["allocated_bytes.all.peak"] - taken["allocated_bytes.all.current"])

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        """It tells no blocks."""


class CpuWorkspace:
    """The same of the compiled allocator; and a log of the step's blocks, with a mark before and behind each op."""

    memory = Memory.ALLOCATED

    def __init__(self, scope: ThreadScope, count: ByteCount) -> None:
        self._scope, self._count = scope, count
        self._log: AllocationLog | None = None
        self._ops: list[CapturedOp] = []
        self._outputs: dict[int, int] = {}
        """By block: which of its op's outputs lies in it."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        joined_count()
        log = AllocationLog(self._scope)
        with log:
            self._log = log
            try:
                yield
            finally:
                self._log = None
        for number, events in enumerate(_by_op(log.events)):
            op = self._ops[number]
            op.blocks = self._blocks(op, events)

    def begin(self) -> None:
        if self._log is not None:
            self._count.mark_peak()
            self._log.mark(1)

    def end(self, op: CapturedOp) -> None:
        if self._log is not None:
            self._log.mark(0)
            op.workspace_bytes = self._count.mark_peak() - self._count.live_bytes
            self._ops.append(op)

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        block = self._count.library.block_at(storage.data_ptr())
        if block >= 0:
            self._outputs[block] = output

    def _blocks(self, op: CapturedOp, events: Table) -> tuple[OpBlock, ...]:
        """Those that the op has taken, small ones aside; none where they are its outputs in their order."""
        born: dict[int, int] = {}
        blocks: list[OpBlock] = []
        for kind, block, size_bytes, _ in events.tolist():
            output = self._outputs.get(block, -1)
            if kind == BIRTH and (output >= 0 or size_bytes >= LEAST_BYTES):
                born[block] = len(blocks)
                blocks.append(OpBlock(size_bytes, output, -1))
            elif kind == DEATH and block in born:
                blocks[born[block]] = blocks[born[block]]._replace(until=len(blocks))
        is_plain = [one.output for one in blocks] == list(range(len(op.outputs)))
        return () if is_plain else tuple(blocks)


def _by_op(events: Table) -> Iterator[Table]:
    """The events between the two marks of each op."""
    marks = np.flatnonzero(events["kind"] == MARK)
    opened = marks[events["value"][marks] == 1]
    closed = marks[events["value"][marks] == 0]
    for first, last in zip(opened, closed, strict=True):
        yield events[first + 1 : last]


def workspace_of(where: torch.device) -> Workspace:
    """The meter of that device."""
    if where.type == "cuda":
        return CudaWorkspace(where)
    scope, count = step_scope(), joined_count()
    return CpuWorkspace(scope, count) if scope is not None and count is not None else NoWorkspace()
