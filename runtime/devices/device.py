"""The device protocol: all that the engine knows of a machine.

Work is queued on *streams* and ordered by *events*, as on CUDA. Three devices speak it: ``cuda.py``, ``cpu.py``, and
the adversarial one of the tests, which runs every copy as late as its events allow.

Stopwatches tell what the compute stream spends between two places, without ever waiting for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from poochplan.runtime.run_report import MemoryPeaks

Interval = tuple[int, int]
"""Bytes of the host tier: the first one, and the one behind the last."""


class Event(Protocol):
    """A place in a stream: all that was queued before it."""

    def done(self) -> bool:
        """Whether all of that has ended."""


class Stream(Protocol):
    """A queue of work that runs first in, first out."""

    def record(self) -> Event:
        """The place behind what is queued now."""

    def wait(self, event: Event) -> float:
        """What is queued from now on runs after ``event``; seconds that the calling thread was held up."""


class Job(Protocol):
    """One queued copy."""

    @property
    def error(self) -> OSError | None:
        """Why it failed; None while it runs and when it went well."""


class Device(Protocol):
    """Storages, a host tier, and a stream for each direction beside those that compute."""

    kind: str
    where: torch.device
    spans: bool
    """Whether what is queued is to be named (:meth:`span`), for a timeline."""

    @property
    def outward(self) -> Stream:
        """The stream of copies to the host tier."""

    @property
    def inward(self) -> Stream:
        """The stream of copies from it."""

    @property
    def compute(self) -> Stream:
        """The stream on which the calling thread's ops are queued."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """A device storage of exactly ``size_bytes``, contents undefined; its own stream is the calling thread's."""

    def reserve_host(self, size_bytes: int, first: int = 0) -> None:
        """Makes the ``size_bytes`` of the host tier from ``first`` on ready ahead of their use.

        No value lies there; copies of dead ones may still be queued. What lies elsewhere stays as it is. Raises
        ``OSError`` where that is not to be had.
        """

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """Gives back what the host tier takes elsewhere, as far as that can be done.

        No value lies elsewhere any more; copies of dead ones may still be queued.
        """

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """Queues a copy of the whole storage to the host tier, on ``outward``. The caller keeps the storage alive.

        One that fails later says so in its ``error``; nothing is raised then.
        """

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """Queues a copy of the whole storage from the host tier, on ``inward``. The caller keeps the storage alive."""

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Ops on the calling thread's stream are about to use a storage that came (back) on the stream ``home``."""

    def replaying(self) -> AbstractContextManager[None]:
        """Ops of forward run again inside, on the calling thread's stream."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Names what is queued inside, for a timeline."""

    def stopwatch(self) -> Stopwatch | None:
        """Tells what the compute stream spends in waits or replays; None where the calling thread is that stream."""

    def synchronize(self) -> None:
        """Holds the calling thread until all that is queued has ended."""

    def start_peaks(self) -> None:
        """Begins new peaks of the allocator's, where there is one."""

    def start_step_peak(self) -> None:
        """A step begins: :meth:`step_peak_bytes` counts from here. The peaks that the user reads stay as they were."""

    def step_peak_bytes(self) -> int | None:
        """The most that was asked of the allocator and in use since then; None where there is none that tells."""

    def peaks(self) -> MemoryPeaks | None:
        """The allocator's peaks; None where there is none."""

    def close(self) -> None:
        """Ends the streams and gives the host tier back. Idempotent."""


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
