"""The log of a captured step on the CPU: what each op takes, and what is taken between ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from poochplan.formats.profile import Memory
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, AllocationLog, Table
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.metering.allocated import aside, joined_count, step_scope

from .carried import carried_in
from .op_blocks import BEGINS, ENDS, POINT, Taker, events_by_op, taken_in
from .strays import Stray, passing_bytes, strays_in
from .workspace import CompiledMeter, CudaWorkspace, Workspace


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
        for number, size_bytes in passing_bytes(self._strays).items():
            if number < len(self._ops):
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
