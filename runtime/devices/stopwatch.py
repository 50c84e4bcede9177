"""Stopwatches: what the compute stream spends between two places, told without ever waiting for it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Seconds that the compute stream spends on what is queued inside the blocks."""

    def running(self) -> AbstractContextManager[None]:
        """Counts what is queued inside, waits for other streams included."""

    def take(self) -> float:
        """Seconds of the blocks that have been passed since the last call; those not yet passed come with a later one.

        Never holds the calling thread. After ``Device.synchronize`` none are missing.
        """


class CudaStopwatch:
    """Two timing events around each block, on the stream that ``current`` gives. Events are used again."""

    def __init__(self, current: Callable[[], torch.cuda.Stream]) -> None:
        self._current = current
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        stream = self._current()
        begin = self._mark(stream)
        try:
            yield
        finally:
            self._running.append((begin, self._mark(stream)))

    def take(self) -> float:
        seconds = 0.0
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            seconds += float(begin.elapsed_time(end)) / 1e3
            self._spare += (begin, end)
        return seconds

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
