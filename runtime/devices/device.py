"""The device protocol: everything that the engine knows about a machine.

Work is queued on *streams* and ordered by *events*, as on CUDA. Four devices follow the protocol: ``cpu.py``,
``accelerator.py``, ``cuda.py``, and the adversarial one of the tests, which runs every copy as late as its events
allow.

Stopwatches measure how long the compute stream takes between two places, without ever waiting for it.
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
"""Bytes of the host tier: the first byte, and the byte after the last."""


class Event(Protocol):
    """A place in a stream: after all work queued before it."""

    def done(self) -> bool:
        """Whether all of that work has ended."""


class Stream(Protocol):
    """A queue of work that runs first in, first out."""

    def record(self) -> Event:
        """The place after all work that is queued now."""

    def wait(self, event: Event) -> float:
        """Work queued from now on runs after ``event``. Returns the seconds for which the calling thread was
        blocked.
        """


class Job(Protocol):
    """One queued copy."""

    @property
    def error(self) -> OSError | None:
        """Why it failed; None while it runs, and after success."""


class ComputeDevice(Protocol):
    """Storages, a host tier, and one stream for each direction in addition to those that compute."""

    kind: str
    where: torch.device
    host_tier: str
    """Where swapped values lie: ``"spill"`` (a file), ``"pinned"``, or ``"pageable"`` where pinning was refused."""
    spans: bool
    """Whether queued work is to be named (:meth:`span`), for a timeline."""

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
        """A device storage of exactly ``size_bytes`` with undefined contents. It belongs to the calling thread's
        stream.
        """

    def reserve_host(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        """Prepares the ``size_bytes`` of the host tier from ``first`` on for their use: those of a plan, in place of
        the plan before, or ``lasting`` ones beside it.

        No value lies there, but copies of dead values may still be queued. Other places stay unchanged. Raises
        ``OSError`` if the memory is not available.
        """

    def host_view(self, size_bytes: int, first: int) -> torch.Tensor:
        """The bytes of the host tier from ``first`` on, reserved together, as a CPU tensor that reads and writes them.
        They stay readable while it lives, also after :meth:`close`. Raises ``OSError``.
        """

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """Releases other places of the host tier, as far as possible.

        No value lies there any more, but copies of dead values may still be queued.
        """

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """Queues a copy of the whole storage to the host tier, on ``outward``. The caller keeps the storage alive.

        If the copy fails later, its ``error`` says so; nothing is raised then.
        """

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """Queues a copy of the whole storage from the host tier, on ``inward``. The caller keeps the storage alive."""

    def read(self, storage: torch.UntypedStorage, host_offset: int) -> None:
        """Fills the storage from the host tier now, without the queue. The copy out has ended. Raises ``OSError``."""

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Ops on the calling thread's stream are about to use a storage that was made or came back on the stream
        ``home``.
        """

    def replaying(self) -> AbstractContextManager[None]:
        """Ops of forward run again inside, on the calling thread's stream."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Names the work queued inside, for a timeline."""

    def stopwatch(self) -> Stopwatch | None:
        """Measures how long the compute stream spends in waits or replays; None if the calling thread is that
        stream.
        """

    def synchronize(self) -> None:
        """Blocks the calling thread until all queued work has ended."""

    def start_peaks(self) -> None:
        """Starts new peaks of the allocator, if there is one."""

    def start_step_peak(self) -> None:
        """A step begins: :meth:`step_peak_bytes` counts from here. The peaks that the user reads stay as they were."""

    def step_peak_bytes(self) -> int | None:
        """Most bytes requested from the allocator and in use since then; None if no allocator reports them."""

    def step_reserved_bytes(self) -> int | None:
        """Most bytes that the allocator had taken from the device since then; None if there is none that reserves."""

    def step_retries(self) -> int:
        """How often the allocator has found no room since then, and emptied its cache."""

    def let_go_of_cache(self) -> None:
        """Gives back what the allocator has taken from the device and nothing uses."""

    def peaks(self) -> MemoryPeaks | None:
        """The allocator's peaks; None where there is none."""

    def close(self) -> None:
        """Ends the streams and gives the host tier back. Idempotent."""


class Stopwatch(Protocol):
    """Seconds that the compute stream spends on the work queued inside the blocks."""

    def running(self) -> AbstractContextManager[None]:
        """Counts the work queued inside, including waits for other streams."""

    def take(self) -> float:
        """Seconds of the blocks that have been passed since the last call. A later call returns those of the others.

        It never blocks the calling thread. After ``ComputeDevice.synchronize`` none are missing.
        """


class DeviceStopwatch:
    """Two timing events around each block, on the stream that ``current`` returns. ``make`` makes an event; they are
    reused.
    """

    def __init__(self, current: Callable[[], torch.Stream], make: Callable[[], torch.Event]) -> None:
        self._current, self._make = current, make
        self._running: deque[tuple[torch.Event, torch.Event]] = deque()
        self._spare: list[torch.Event] = []

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

    def _mark(self, stream: torch.Stream) -> torch.Event:
        event = self._spare.pop() if self._spare else self._make()
        event.record(stream)
        return event
