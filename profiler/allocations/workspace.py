"""What an op takes and gives back inside, and which blocks it leaves behind, as the device's allocator tells."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from poochplan.formats.profile import Memory
from poochplan.profiler.capture.captured import CapturedOp

from .op_blocks import Taker
from .region import Region, region_of
from .strays import Stray


class Workspace:
    """By itself of a CPU without the compiled allocator, and of steps without memory: the meter of regions alone tells
    what it knows.
    """

    memory = Memory.LIVE
    """Whether it knows what ops take."""

    def region(self) -> Region:
        """The meter of compiled regions."""
        return region_of(torch.device("cpu"))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A block whose ops are asked about; behind it their blocks are known."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Before an op."""

    def end(self, op: CapturedOp) -> None:
        """Behind it, while its outputs live: notes its workspace."""

    def region_begins(self) -> None:
        """Before a compiled region, or its backward."""

    def region_ends(self, op: CapturedOp, taker: Taker) -> None:
        """Behind it."""

    def freed(self, size_bytes: int) -> None:
        """The last hold of a value ends in a region that has not borne it."""

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

    def region(self) -> Region:
        return region_of(self._where)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._where)

    def end(self, op: CapturedOp) -> None:
        taken = torch.cuda.memory_stats(self._where)
        op.workspace_bytes = int(taken["allocated_bytes.all.peak"] - taken["allocated_bytes.all.current"])
