"""StepLog: what happens in a step and when, as marks that are read when the step is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from poochplan.report.inspection.step_trace import THREAD
from poochplan.report.memory import MemoryCurve
from poochplan.report.timeline import Bar


class TraceClock(Protocol):
    """Marks, and how many seconds after the origin each was passed."""

    def start(self) -> None:
        """The origin is now."""

    def mark(self, stream: Any = None) -> Any:
        """Now; of a device's stream, the place behind what is queued on it."""

    def seconds(self, mark: Any) -> float:
        """From the origin to a mark that has been passed."""


class HostClock:
    """Marks are the calling thread's time. State: the origin."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()

    def start(self) -> None:
        self._origin_s = time.perf_counter()

    def mark(self, stream: Any = None) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self._origin_s


class DeviceClock:
    """Marks are events on a CUDA stream, by default the current one. State: the origin."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._origin: torch.cuda.Event | None = None

    def start(self) -> None:
        self._origin = self.mark()

    def mark(self, stream: Any = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self._where))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        assert self._origin is not None, "start() comes first"
        return float(self._origin.elapsed_time(mark)) / 1e3


class _Entry(NamedTuple):
    row: str
    what: str
    label: str
    begin: Callable[[], float]
    end: Callable[[], float]


class StepLog:
    """State: whether it listens, and what it has heard. ``clock`` is the compute stream's, ``host`` the thread's."""

    def __init__(self, where: torch.device) -> None:
        self.host = HostClock()
        self.clock: TraceClock = self.host if where.type == "cpu" else DeviceClock(where)
        self.is_on = False
        self._entries: list[_Entry] = []
        self._sizes: list[tuple[Any, int]] = []

    def start(self) -> None:
        """The step begins now."""
        self.host.start()
        self.clock.start()
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    @contextlib.contextmanager
    def block(self, row: str, what: str, label: str) -> Iterator[None]:
        """What is queued on the compute stream inside; on the row of the thread, what it does inside."""
        if not self.is_on:
            yield
            return
        clock = self.host if row == THREAD else self.clock
        begin = clock.mark()
        try:
            yield
        finally:
            self.took(row, what, label, begin, clock.mark(), clock)

    def took(self, row: str, what: str, label: str, begin: Any, end: Any, clock: TraceClock | None = None) -> None:
        """Something ran between two marks, of the compute stream's clock unless another is named."""
        read = (clock or self.clock).seconds
        self.took_later(row, what, label, lambda: read(begin), lambda: read(end))

    def took_later(self, row: str, what: str, label: str, begin: Callable[[], float], end: Callable[[], float]) -> None:
        """The same for what has perhaps not yet run: asked for seconds since the origin when the step is over."""
        if self.is_on:
            self._entries.append(_Entry(row, what, label, begin, end))

    def live(self, size_bytes: int) -> None:
        """So many bytes are live from here on."""
        if self.is_on:
            self._sizes.append((self.clock.mark(), size_bytes))

    def bars(self) -> tuple[Bar, ...]:
        """All that was heard of, in order of begin; nothing begins before the step."""
        read = [Bar(one.row, one.what, max(0.0, one.begin()), one.end(), one.label) for one in self._entries]
        return tuple(sorted((bar for bar in read if bar.end_s >= bar.start_s), key=lambda bar: bar.start_s))

    def memory(self, end_s: float) -> MemoryCurve:
        """Live bytes from the first mark on to the end of the step."""
        times_s = [max(0.0, self.clock.seconds(mark)) for mark, _ in self._sizes]
        sizes = [size for _, size in self._sizes]
        order = np.argsort(times_s, kind="stable")
        times = np.append(np.asarray(times_s)[order], end_s) if times_s else np.zeros(0)
        return MemoryCurve(np.maximum.accumulate(times), np.asarray(sizes, dtype=np.int64)[order])
