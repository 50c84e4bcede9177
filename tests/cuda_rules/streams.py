"""Streams and events: queues that run late, and vector clocks that tell whether two accesses are ordered at all."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

Clock = dict[int, int]
"""How many pieces of work of each stream are known to have ended; a stream is its number."""

OP_S, COPY_S, LAUNCH_S = 5e-6, 10e-6, 1e-6
OP_BYTES_PER_S, COPY_BYTES_PER_S, CYCLES_PER_S = 1e12, 2e10, 2e9
"""The simulated machine: what an op, a copy and a launch take, beside their bytes."""


def join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Mark:
    """One recording of an event: a place in a stream's queue."""

    def __init__(self, stream: Stream, clock: Clock) -> None:
        self.stream = stream
        self.clock = clock
        self.has_run = False
        self.at_s = 0.0


class Work:
    """Something queued that takes time: a copy, or sleeping."""

    def __init__(self, seconds: float, launched_s: float, run: Callable[[], None] = lambda: None) -> None:
        self.seconds, self.launched_s, self.run = seconds, launched_s, run


class Host:
    """The launching threads, taken together: what they know to have ended, and their simulated time."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0
        """Grows with the clock."""
        self.now_s = 0.0
        self.violations: list[str] = []
        self.numbers = itertools.count()
        self.streams: list[Stream] = []

    def launches(self) -> float:
        self.now_s += LAUNCH_S
        return self.now_s

    def learns(self, mark: Mark) -> None:
        """It has waited for the mark."""
        join(self.clock, mark.clock)
        self.version += 1
        self.now_s = max(self.now_s, mark.at_s)


class Stream:
    """State: the queue of what has not run yet, the clock of what its next work comes after, and the simulated time."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._host_version = -1
        self.number = next(host.numbers)
        host.streams.append(self)
        self.queue: deque[Mark | Work] = deque()
        self.clock: Clock = {}
        self.time_s = 0.0

    # -- queueing ---------------------------------------------------------------------------------------------

    def begins(self) -> tuple[int, int]:
        """A piece of work is queued, or runs: its number, which later accesses are told apart by."""
        if self._host_version != self.host.version:
            self._host_version = self.host.version
            join(self.clock, self.host.clock)
        count = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = count
        return self.number, count

    def knows(self, work: tuple[int, int]) -> bool:
        """Whether what is queued now runs after that piece of work."""
        stream, count = work
        return max(self.clock.get(stream, 0), self.host.clock.get(stream, 0)) >= count

    def put(self, seconds: float, run: Callable[[], None] = lambda: None) -> None:
        self.queue.append(Work(seconds, self.host.launches(), run))

    def mark(self) -> Mark:
        self.begins()
        mark = Mark(self, dict(self.clock))
        self.queue.append(mark)
        if len(self.queue) == 1:
            self.run_next()
        return mark

    def wait_for(self, mark: Mark) -> None:
        join(self.clock, mark.clock)
        if mark.stream is not self and not mark.has_run:
            self.queue.append(mark)
        elif mark.has_run:
            self.time_s = max(self.time_s, mark.at_s)

    # -- running ----------------------------------------------------------------------------------------------

    def run_next(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Work):
            item.run()
            self.time_s = max(self.time_s, item.launched_s) + item.seconds
        elif item.stream is self:
            item.has_run, item.at_s = True, self.time_s
        else:
            item.stream.run_until(item)
            self.time_s = max(self.time_s, item.at_s)

    def run_until(self, mark: Mark) -> None:
        while not mark.has_run:
            self.run_next()

    def catch_up(self) -> None:
        """An op is about to run, or the host waits: all that is queued here runs."""
        while self.queue:
            self.run_next()

    def op_runs(self, size_bytes: int) -> None:
        """An op that touches so many bytes has run."""
        self.time_s = max(self.time_s, self.host.launches()) + OP_S + size_bytes / OP_BYTES_PER_S

    def synchronise(self) -> None:
        mark = self.mark()
        self.catch_up()
        self.host.learns(mark)


class Accesses:
    """Who wrote and read a block of memory last; survives its tenants, as the hazards between them do."""

    def __init__(self) -> None:
        self.written: tuple[tuple[int, int], str] | None = None
        self.read: dict[int, tuple[tuple[int, int], str]] = {}

    def note(self, stream: Stream, work: tuple[int, int], what: str, *, writes: bool) -> list[str]:
        """Notes one access; tells those before it that nothing orders before it."""
        before = [self.written] if self.written is not None else []
        before += [one for one in self.read.values() if writes]
        found = [f"{what} may run before or beside {other}" for done, other in before if not stream.knows(done)]
        if writes:
            self.written, self.read = (work, what), {}
        else:
            self.read[stream.number] = (work, what)
        return found

    def known_to(self, stream: Stream) -> None:
        """What ``stream`` does next comes after all of them."""
        for number, count in [work for work, _ in (*self.read.values(), *([self.written] if self.written else []))]:
            join(stream.clock, {number: count})

    def unknown_to(self, stream: Stream) -> list[str]:
        """Accesses that what ``stream`` does next need not come after."""
        every: list[Any] = [*self.read.values(), *([self.written] if self.written is not None else [])]
        return [what for work, what in every if not stream.knows(work)]
