"""What a compiled region takes beyond what was live as it began. One way for each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from poochplan.runtime.metering.compiled_regions import CpuRegion


class Region(Protocol):
    """Bytes that a compiled region takes, what the capture copies meanwhile set aside."""

    def begin(self) -> None:
        """Before the region."""

    def end(self) -> int | None:
        """Most bytes above what was live as it began; None where they are not known."""

    def freed(self, size_bytes: int) -> None:
        """A storage of that size dies."""

    def set_aside(self) -> AbstractContextManager[object]:
        """A block whose allocations are not the region's."""


class CudaRegion:
    """The caching allocator's peak since the region began."""

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

    @contextmanager
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


def region_of(where: torch.device) -> Region:
    """The meter of compiled regions of that device."""
    return CudaRegion(where) if where.type == "cuda" else CpuRegion()
