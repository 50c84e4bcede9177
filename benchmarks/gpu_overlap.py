"""Which share of the copies ran beside compute: a CUDA device that marks its copies and waits, and the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from poochplan.runtime.devices.accelerator import ComputeStream, QueueStream
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.device import Event
from poochplan.runtime.devices.pinned import Part

Interval = tuple[float, float]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same seconds, each counted once, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in united(intervals))


def shared_s(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    left, right = united(left), united(right)
    return total_s(left) + total_s(right) - total_s([*left, *right])


def overlap(copies: list[Interval], stalls: list[Interval]) -> float | None:
    """Share of the copies' time in which compute did not wait for a copy; None without copies."""
    return 1 - shared_s(copies, stalls) / total_s(copies) if total_s(copies) > 0 else None


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


@dataclass
class Log:
    """Events before and behind each copy and each wait, while it is on."""

    is_on: bool = False
    copies: list[Any] = field(default_factory=list)
    waits: list[Any] = field(default_factory=list)


class TimedCompute(ComputeStream):
    """Marks each wait; an interval is as long as compute was held up by it."""

    def __init__(self, stream: ComputeStream, log: Log) -> None:
        super().__init__(stream.stream, stream.address, stream.spare, stream.seen)
        self.log = log

    def wait(self, event: Event) -> float:
        if not self.log.is_on:
            return super().wait(event)
        begin = _mark(self.stream)
        held_up_s = super().wait(event)
        self.log.waits.append((begin, _mark(self.stream)))
        return held_up_s


class TimedCuda(CudaDevice):
    """The CUDA device; from :meth:`begin` on with two events around each copy and each wait."""

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._log = Log()
        self._base = _mark(super().compute.stream)

    @property
    def compute(self) -> TimedCompute:
        stream = super().compute
        return TimedCompute(stream, self._log)

    def _queue(self, storage: torch.UntypedStorage, parts: list[Part], kind: int, stream: QueueStream) -> None:
        if not self._log.is_on:
            return super()._queue(storage, parts, kind, stream)
        begin = _mark(stream.stream)
        super()._queue(storage, parts, kind, stream)
        self._log.copies.append((begin, _mark(stream.stream)))

    def begin(self) -> None:
        self.synchronize()
        self._log.is_on = True
        self._base = _mark(super().compute.stream)

    def copies_and_stalls(self) -> tuple[list[Interval], list[Interval]]:
        """Seconds since :meth:`begin` of every copy, and of every wait of compute for one."""
        self.synchronize()
        copies, stalls = (
            [(self._base.elapsed_time(begin) / 1e3, self._base.elapsed_time(end) / 1e3) for begin, end in marks]
            for marks in (self._log.copies, self._log.waits)
        )
        return copies, stalls
