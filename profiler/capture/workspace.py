"""What an op takes and gives back inside, and which blocks it leaves behind, as the device's allocator tells."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from poochplan.formats.profile import Memory, OpBlock
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, LEAST_PLACED_BYTES, rounded_up
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, MARK, AllocationLog, Table
from poochplan.runtime.allocator.counting import ByteCount
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.metering.allocated import joined_count, step_scope

from .captured import CapturedOp

BEGINS, ENDS = 1, 0
"""Marks before and behind an op."""


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

    def knows(self, storage: torch.UntypedStorage) -> None:
        """A value lies there."""

    def strays(self) -> dict[CapturedOp | None, int]:
        """Bytes of what was taken between ops and is no value's, as a checkpoint's states of generators, by the op that
        ran next when it was given back; None where none did, or it was not.
        """


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

    def knows(self, storage: torch.UntypedStorage) -> None:
        """Nothing to do."""

    def strays(self) -> dict[CapturedOp | None, int]:
        return {}


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

    def knows(self, storage: torch.UntypedStorage) -> None:
        """It tells no blocks."""

    def strays(self) -> dict[CapturedOp | None, int]:
        return {}


class CpuWorkspace:
    """The same of the compiled allocator; and a log of the step's blocks, with a mark before and behind each op."""

    memory = Memory.ALLOCATED

    def __init__(self, scope: ThreadScope, count: ByteCount) -> None:
        self._scope, self._count = scope, count
        self._log: AllocationLog | None = None
        self._ops: list[CapturedOp] = []
        self._outputs: dict[int, int] = {}
        """By block: which of its op's outputs lies in it."""
        self._known: set[int] = set()
        """Blocks in which values lie."""
        self._strays: dict[CapturedOp | None, int] = {}

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
        self._strays = self._between(log.events)
        for number, events in enumerate(_by_op(log.events)):
            op = self._ops[number]
            op.blocks = self._blocks(op, events)

    def begin(self) -> None:
        if self._log is not None:
            self._count.mark_peak()
            self._log.mark(BEGINS)

    def end(self, op: CapturedOp) -> None:
        if self._log is not None:
            self._log.mark(ENDS)
            op.workspace_bytes = self._count.mark_peak() - self._count.live_bytes
            self._ops.append(op)

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        block = self._count.library.block_at(storage.data_ptr())
        if block >= 0:
            self._outputs[block] = output

    def knows(self, storage: torch.UntypedStorage) -> None:
        self._known.add(self._count.library.block_at(storage.data_ptr()))

    def strays(self) -> dict[CapturedOp | None, int]:
        return self._strays

    def _between(self, events: Table) -> dict[CapturedOp | None, int]:
        """The strays. Those that are given back before the next op begins are a part of its workspace instead."""
        alive: dict[int, tuple[int, int]] = {}
        found: Counter[CapturedOp | None] = Counter()
        passing: Counter[CapturedOp] = Counter()
        ops, is_inside = 0, False
        for kind, block, size_bytes, value in events.tolist():
            if kind == MARK:
                is_inside = value == BEGINS
                ops += value == ENDS
            elif kind == BIRTH and not is_inside and block not in self._known and size_bytes >= LEAST_COUNTED_BYTES:
                alive[block] = ops, size_bytes
            elif kind == DEATH and block in alive:
                born, size_bytes = alive.pop(block)
                following = self._ops[ops] if ops < len(self._ops) else None
                if following is not None and born == ops:
                    passing[following] += rounded_up(size_bytes)
                else:
                    found[following] += rounded_up(size_bytes)
        for op, size_bytes in passing.items():
            op.workspace_bytes = max(op.workspace_bytes, size_bytes)
        found[None] += sum(rounded_up(size_bytes) for _, size_bytes in alive.values())
        return dict(found)

    def _blocks(self, op: CapturedOp, events: Table) -> tuple[OpBlock, ...]:
        """Those that the op has taken, small ones aside; none where they are its outputs in their order."""
        born: dict[int, int] = {}
        blocks: list[OpBlock] = []
        for kind, block, size_bytes, _ in events.tolist():
            output = self._outputs.get(block, -1)
            if kind == BIRTH and (output >= 0 or size_bytes >= LEAST_PLACED_BYTES):
                born[block] = len(blocks)
                blocks.append(OpBlock(size_bytes, output, -1))
            elif kind == DEATH and block in born:
                before = blocks[born[block]]
                blocks[born[block]] = OpBlock(before.size_bytes, before.output, len(blocks))
        is_plain = [one.output for one in blocks] == list(range(len(op.outputs)))
        return () if is_plain else tuple(blocks)


def _by_op(events: Table) -> Iterator[Table]:
    """The events between the two marks of each op."""
    marks = np.flatnonzero(events["kind"] == MARK)
    opened = marks[events["value"][marks] == BEGINS]
    closed = marks[events["value"][marks] == ENDS]
    for first, last in zip(opened, closed, strict=True):
        yield events[first + 1 : last]


def workspace_of(where: torch.device) -> Workspace:
    """The meter of that device."""
    if where.type == "cuda":
        return CudaWorkspace(where)
    scope, count = step_scope(), joined_count()
    return CpuWorkspace(scope, count) if scope is not None and count is not None else NoWorkspace()
