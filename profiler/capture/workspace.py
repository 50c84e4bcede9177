"""What an op takes and gives back inside, and which blocks it leaves behind, as the device's allocator tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from poochplan.formats.profile import Memory
from poochplan.runtime.allocator.library import BIRTH, DEATH, AllocationLog, Table, ThreadScope
from poochplan.runtime.metering.allocated import aside, joined_count, step_scope
from poochplan.runtime.metering.compiled_code import CpuMeter

from .captured import CapturedOp
from .op_blocks import (
    BEGINS,
    ENDS,
    POINT,
    Stray,
    Taker,
    bytes_beside_ops,
    carried_in,
    events_by_op,
    strays_in,
    taken_in,
)


class CompiledMeter(Protocol):
    """Bytes that compiled code takes, what the capture copies meanwhile set aside."""

    def begin(self) -> None:
        """Before the code."""

    def end(self) -> int | None:
        """Most bytes above what was live as it began; None where they are not known."""

    def freed(self, size_bytes: int) -> None:
        """A storage of that size dies."""

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        """A block whose allocations are not the code's."""


class CudaMeter:
    """The caching allocator's peak since the code began."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._begin_bytes = self._aside_bytes = self._most_bytes = 0

    def begin(self) -> None:
        self._begin_bytes, self._aside_bytes, self._most_bytes = self._now("current"), 0, 0
        torch.cuda.reset_peak_memory_stats(self._where)

    def end(self) -> int:
        self._look()
        return self._most_bytes

    def freed(self, size_bytes: int) -> None:
        """Nothing to do: the allocator knows."""

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        self._look()
        before_bytes = self._now("current")
        yield
        self._aside_bytes += self._now("current") - before_bytes
        torch.cuda.reset_peak_memory_stats(self._where)

    def _look(self) -> None:
        self._most_bytes = max(self._most_bytes, self._now("peak") - self._begin_bytes - self._aside_bytes)

    def _now(self, which: str) -> int:
        return int(torch.cuda.memory_stats(self._where)[f"allocated_bytes.all.{which}"])


class Workspace:
    """By itself of a CPU without the compiled allocator, and of steps without memory: the meter of compiled code
    alone tells what it knows.
    """

    memory = Memory.LIVE
    """Whether it knows what ops take."""

    def compiled_meter(self) -> CompiledMeter:
        """The meter of compiled code."""
        return CpuMeter()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A block whose ops are asked about; behind it their blocks are known."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Before an op."""

    def end(self, op: CapturedOp) -> None:
        """Behind it, while its outputs live: notes its workspace."""

    def compiled_begins(self) -> None:
        """Before compiled code, or its backward."""

    def compiled_ends(self, op: CapturedOp, taker: Taker) -> None:
        """Behind it."""

    def freed(self, size_bytes: int) -> None:
        """The last hold of a value ends in compiled code that has not borne it."""

    def passes_point(self) -> None:
        """A point of the runtime's clock has been passed."""

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        """That output of the op lies there."""

    def knows(self, storage: torch.UntypedStorage) -> None:
        """A value lies there."""

    def next_block(self) -> int:
        """The number of the block that is taken next; they count up."""
        return 0

    def block_of(self, storage: torch.UntypedStorage) -> int:
        """The number of the block in which it lies."""
        return 0

    def strays(self) -> Sequence[Stray]:
        """What was taken between ops and is no value's, as a checkpoint's states of generators."""
        return ()


class CudaWorkspace(Workspace):
    """The caching allocator's peak during the op, less what is allocated behind it."""

    memory = Memory.ALLOCATED

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def compiled_meter(self) -> CompiledMeter:
        return CudaMeter(self._where)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._where)

    def end(self, op: CapturedOp) -> None:
        taken = torch.cuda.memory_stats(self._where)
        op.workspace_bytes = int(taken["allocated_bytes.all.peak"] - taken["allocated_bytes.all.current"])


class LoggedMeter:
    """Of compiled code the step's log tells what they take, once it has ended."""

    def begin(self) -> None:
        """The log has a mark there."""

    def end(self) -> int:
        return 0

    def freed(self, size_bytes: int) -> None:
        """The log is told."""

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        return aside()


class LoggedWorkspace(Workspace):
    """The compiled allocator's log of the step's blocks, with marks before and behind ops, and behind points."""

    memory = Memory.ALLOCATED

    def __init__(self, scope: ThreadScope) -> None:
        self._scope = scope
        self._log: AllocationLog | None = None
        self._ops: list[tuple[CapturedOp, Taker]] = []
        self._outputs: dict[int, int] = {}
        """By block: which of its op's outputs lies in it."""
        self._known: set[int] = set()
        """Blocks in which values lie."""
        self._strays: Sequence[Stray] = ()

    def compiled_meter(self) -> CompiledMeter:
        return LoggedMeter()

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
        self._read(_of_this_thread(log.events, first))

    def begin(self) -> None:
        self._mark(BEGINS)

    def end(self, op: CapturedOp) -> None:
        self.compiled_ends(op, Taker.OP)

    def compiled_begins(self) -> None:
        self._mark(BEGINS)

    def compiled_ends(self, op: CapturedOp, taker: Taker) -> None:
        if self._log is not None:
            self._log.mark(ENDS)
            self._ops.append((op, taker))

    def freed(self, size_bytes: int) -> None:
        if size_bytes:
            self._mark(-size_bytes)

    def passes_point(self) -> None:
        self._mark(POINT)

    def holds(self, op: CapturedOp, output: int, storage: torch.UntypedStorage) -> None:
        block = self._block_at(storage)
        if block >= 0:
            self._outputs[block] = output

    def knows(self, storage: torch.UntypedStorage) -> None:
        self._known.add(self._block_at(storage))

    def next_block(self) -> int:
        return self._scope.library.next_block()

    def block_of(self, storage: torch.UntypedStorage) -> int:
        return self._block_at(storage)

    def strays(self) -> Sequence[Stray]:
        return self._strays

    def _mark(self, value: int) -> None:
        if self._log is not None:
            self._log.mark(value)

    def _block_at(self, storage: torch.UntypedStorage) -> int:
        return self._scope.library.block_at(storage.data_ptr())

    def _read(self, events: Table) -> None:
        parts = carried_in(events_by_op(events), [taker for _, taker in self._ops], self._outputs)
        for one in parts.carried:
            assert one.let_go_in is not None
            op, _ = self._ops[one.made_in]
            self._outputs[one.block] = len(op.outputs) + len(op.carried)
            op.carried.append((one.size_bytes, self._ops[one.let_go_in][0]))
        for (op, taker), own in zip(self._ops, parts.events, strict=True):
            output_count = len(op.outputs) + len(op.carried)
            op.blocks, op.workspace_bytes = taken_in(own, self._outputs, output_count, taker)
        self._strays = strays_in(events.tolist(), self._known)
        for number, size_bytes in bytes_beside_ops(self._strays).items():
            if 0 <= number < len(self._ops):
                op, _ = self._ops[number]
                op.workspace_bytes = max(op.workspace_bytes, size_bytes)


def _of_this_thread(events: Table, first: int) -> Table:
    """Without deaths of what other threads of the scope have given birth to since ``first``: that is not logged."""
    born = events["block"][events["kind"] == BIRTH]
    is_other = (events["kind"] == DEATH) & (events["block"] >= first) & ~np.isin(events["block"], born)
    found: Table = events[~is_other]
    return found


def workspace_of(where: torch.device) -> Workspace:
    """The meter of that device."""
    if where.type == "cuda":
        return CudaWorkspace(where)
    scope = step_scope()
    return Workspace() if scope is None or joined_count() is None else LoggedWorkspace(scope)
