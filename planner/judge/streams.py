"""Two copy queues beside one compute stream: the time part of ``docs/semantics.md``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from poochplan.formats.profile import Link


class Lane(StrEnum):
    """What a span of the trace shows."""

    COMPUTE = "compute"
    STALL = "stall"
    REPLAY = "replay"
    RUNTIME = "runtime"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Span:
    """One bar of the timeline."""

    lane: Lane
    label: str
    start_s: float
    end_s: float


class _Queue:
    """One direction: first in, first out, one copy at a time; ``left_s`` counts seconds alone on the link."""

    __slots__ = ("current", "done", "label", "left_s", "start_s", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, float, str]] = deque()
        self.done: set[int] = set()
        self.current = -1
        self.left_s = 0.0
        self.label = ""
        self.start_s = 0.0

    def add(self, value: int, seconds: float, label: str, now_s: float) -> None:
        self.waiting.append((value, seconds, label))
        if self.current < 0:
            self.start_next(now_s)

    def start_next(self, now_s: float) -> None:
        self.current = -1
        if self.waiting:
            self.current, self.left_s, self.label = self.waiting.popleft()
            self.start_s = now_s


class Streams:
    """The compute stream's clock and both queues. ``now_s`` only moves in :meth:`_advance`."""

    def __init__(self, link: Link, trace: bool) -> None:
        self.link, self.trace = link, trace
        self.now_s = self.stall_s = self.interference_s = self.runtime_s = 0.0
        self._slows = link.interference_out > 0.0 or link.interference_in > 0.0
        self.spans: list[Span] = []
        self.marks: list[tuple[int, float, float]] = []
        """(tick, work done, wall time) after each point at which something was done."""
        self.progress: list[tuple[float, float]] = []
        """(work done, wall time) along the compute stream."""
        self._work_s = 0.0
        self._out, self._in = _Queue(), _Queue()

    def compute(self, work_s: float) -> None:
        """Runs ``work_s`` seconds of the in-core step, slowed by the copies beside it."""
        start_s = self.now_s
        self._run(work_s, counts=True)
        self._span(Lane.COMPUTE, "", start_s)

    def replay(self, work_s: float, label: str) -> None:
        """Runs recomputed ops."""
        start_s = self.now_s
        self._run(work_s, counts=False)
        self._span(Lane.REPLAY, label, start_s)

    def spend(self, work_s: float) -> None:
        """Runs the runtime's own work, slowed by the copies as all else."""
        start_s = self.now_s
        if self._out.current < 0 and self._in.current < 0:
            self.now_s += work_s
        else:
            self._run(work_s, counts=False)
        self.runtime_s += work_s
        self._span(Lane.RUNTIME, "", start_s)

    def wait_until(self, wall_s: float) -> None:
        """Nothing is launched before ``wall_s``."""
        if wall_s <= self.now_s:
            return
        start_s = self.now_s
        self.runtime_s += wall_s - start_s
        self._pass(wall_s - start_s)
        self._span(Lane.RUNTIME, "", start_s)

    @property
    def is_undisturbed(self) -> bool:
        """Whether what runs now is not slowed until another copy is queued."""
        return not self._slows or (self._out.current < 0 and self._in.current < 0)

    def compute_between_waits(self, work_s: float, idle_s: float) -> None:
        """Both together while :attr:`is_undisturbed`: what is computed, and the waits for launches in between."""
        self.runtime_s += idle_s
        self._pass(work_s + idle_s)

    def queue_out(self, value: int, seconds: float, label: str) -> None:
        self._out.add(value, seconds, label, self.now_s)

    def queue_in(self, value: int, seconds: float, label: str) -> None:
        self._in.add(value, seconds, label, self.now_s)

    def wait_out(self, value: int, label: str) -> None:
        self._wait(self._out, value, label)

    def wait_in(self, value: int, label: str) -> None:
        self._wait(self._in, value, label)

    def mark(self, tick: int, work_s: float) -> None:
        """Notes that the point at ``tick`` is over."""
        if self.marks and self.marks[-1][0] == tick:
            self.marks.pop()
        self.marks.append((tick, work_s, self.now_s))

    def _run(self, work_s: float, *, counts: bool) -> None:
        link = self.link
        while work_s > 0.0:
            slow = 1.0
            if self._out.current >= 0:
                slow += link.interference_out
            if self._in.current >= 0:
                slow += link.interference_in
            wall_s = self._advance(work_s * slow)
            done_s = min(work_s, wall_s / slow)
            self.interference_s += wall_s - done_s
            work_s = 0.0 if wall_s >= work_s * slow else work_s - done_s
            if counts:
                self._work_s += done_s
                if self.trace:
                    self.progress.append((self._work_s, self.now_s))

    def _pass(self, left_s: float) -> None:
        while left_s > 0.0:
            left_s -= self._advance(left_s)

    def _wait(self, queue: _Queue, value: int, label: str) -> None:
        start_s = self.now_s
        while value not in queue.done:
            assert queue.current >= 0, f"waits for a copy of {label} that was never queued"
            self.stall_s += self._advance(float("inf"))
        self._span(Lane.STALL, label, start_s)

    def _advance(self, limit_s: float) -> float:
        """Moves the clock by ``limit_s`` or to the next end of a copy, whichever is first; returns by how much."""
        out_queue, in_queue = self._out, self._in
        if out_queue.current < 0 and in_queue.current < 0:
            self.now_s += limit_s
            return limit_s
        share = self.link.duplex if out_queue.current >= 0 and in_queue.current >= 0 else 1.0
        wall_s = limit_s
        running = [queue for queue in (out_queue, in_queue) if queue.current >= 0]
        for queue in running:
            wall_s = min(wall_s, queue.left_s / share)
        self.now_s += wall_s
        for queue in running:
            if queue.left_s / share <= wall_s:
                self._finish(queue)
            else:
                queue.left_s -= wall_s * share
        return wall_s

    def _finish(self, queue: _Queue) -> None:
        if self.trace:
            lane = Lane.OUT if queue is self._out else Lane.IN
            self.spans.append(Span(lane, queue.label, queue.start_s, self.now_s))
        queue.done.add(queue.current)
        queue.start_next(self.now_s)

    def _span(self, lane: Lane, label: str, start_s: float) -> None:
        if self.trace and self.now_s > start_s:
            self.spans.append(Span(lane, label, start_s, self.now_s))
