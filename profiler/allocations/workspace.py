"""What an op takes and gives back inside, and which blocks it leaves behind, as the device's allocator tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from poochplan.formats.profile import Memory
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.runtime.metering.compiled_code import CpuMeter

from .op_blocks import Taker
from .strays import Stray


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
