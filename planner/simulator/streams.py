"""The time part of ``docs/semantics.md``: one compute stream, two copy queues, and the thread that launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from poochplan.formats.occupancy import Floats, Ints
from poochplan.formats.profile import Link
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.replays import MergedReplay
from poochplan.planner.simulator.schedule import Schedule


class Lane(StrEnum):
    """The kind of a span in the trace."""

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

    def compute(self, work_s: float, lane: Lane = Lane.COMPUTE, label: str = "") -> None:
        """Runs seconds of the step, of recomputed ops, or of the runtime's own work, slowed by the copies beside it."""
        link, start_s = self.link, self.now_s
        if lane is Lane.RUNTIME:
            self.runtime_s += work_s
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
            if lane is Lane.COMPUTE:
                self._work_s += done_s
                if self.trace:
                    self.progress.append((self._work_s, self.now_s))
        self._span(lane, label, start_s)

    def wait_until(self, wall_s: float) -> None:
        """Waits until ``wall_s``, before which nothing is launched."""
        if wall_s <= self.now_s:
            return
        start_s = self.now_s
        self.runtime_s += wall_s - start_s
        self._pass(wall_s - start_s)
        self._span(Lane.RUNTIME, "", start_s)

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing slows the compute stream until another copy is queued."""
        return not self._slows or (self._out.current < 0 and self._in.current < 0)

    def compute_between_waits(self, work_s: float, idle_s: float) -> None:
        """Computes, with waits for launches in between; only while :attr:`is_undisturbed`."""
        self.runtime_s += idle_s
        self._pass(work_s + idle_s)

    def queue(self, value: int, seconds: float, label: str, *, is_out: bool) -> None:
        """Queues a copy that takes ``seconds`` alone on the link."""
        (self._out if is_out else self._in).add(value, seconds, label, self.now_s)

    def wait(self, value: int, label: str, *, is_out: bool) -> None:
        queue, start_s = self._out if is_out else self._in, self.now_s
        while value not in queue.done:
            assert queue.current >= 0, f"waits for a copy of {label} that was never queued"
            self.stall_s += self._advance(float("inf"))
        self._span(Lane.STALL, label, start_s)

    def mark(self, tick: int, work_s: float) -> None:
        """Records the end of the point at ``tick``."""
        if self.marks and self.marks[-1][0] == tick:
            self.marks.pop()
        self.marks.append((tick, work_s, self.now_s))

    def _pass(self, left_s: float) -> None:
        while left_s > 0.0:
            left_s -= self._advance(left_s)

    def _advance(self, limit_s: float) -> float:
        """Moves the clock by ``limit_s``, or to the next end of a copy if earlier. Returns the seconds moved."""
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


class Thread:
    """A launching thread that is the compute stream itself, as on the CPU. Its work is like that of ops."""

    def __init__(self, problem: Problem, streams: Streams, recorded: Ints | None) -> None:
        self.streams, self._cost = streams, problem.launch_cost
        self.work_before_op_s: Floats = problem.work_before_op_s
        self.recording_s = 0.0
        """Seconds that recording adds to the compute stream's work."""
        self.done_s = 0.0
        """Work done so far, without replays and the work at points."""
        self._point_work = problem.point_work_list
        if recorded is not None and self._cost.is_compute:
            self.work_before_op_s = problem.work_before_op_s + self._cost.record_s * recorded
            self.recording_s = self._cost.record_s * int(recorded[-1])
            self._point_work = self.work_before_op_s[list(problem.point_ops)].tolist()

    def reach(self, point: int) -> None:
        """Runs all work before the point."""
        work_s = self._point_work[point]
        if work_s > self.done_s:
            self.streams.compute(work_s - self.done_s)
            self.done_s = work_s

    def take(self, seconds: float) -> None:
        """Runs the runtime's own work at a point."""
        self.streams.compute(seconds, Lane.RUNTIME)

    def replay(self, replay: MergedReplay, label: str) -> None:
        """Runs the ops of a replay."""
        self.streams.compute(replay.seconds, Lane.REPLAY, label)
        self.take(self._cost.replay_s * len(replay.ops))

    def finish(self) -> None:
        """Runs the rest of the step."""
        self.streams.compute(float(self.work_before_op_s[-1]) - self.done_s)


class AheadThread(Thread):
    """A thread ahead of the device: an op starts once it is launched and the device is free.

    Between two points, if no copy slows them, only the op whose launch is the latest relative to a device that never
    waits determines when all of them end.
    """

    def __init__(self, problem: Problem, streams: Streams, recorded: Ints | None, points: Iterable[int]) -> None:
        """``points`` are those with actions."""
        super().__init__(problem, streams, recorded)
        cost, self._op_seconds, self._point_ops = self._cost, problem.replay.op_seconds, problem.point_ops
        at_op = cost.before_op_s if recorded is None else cost.before_op_s + cost.record_s * recorded
        launched = at_op[:-1] if recorded is None else at_op[:-1] + cost.record_s * np.diff(recorded)
        work, count = self.work_before_op_s, len(launched)
        self._behind: Floats = launched - work[:-1]
        """Per op: seconds by which the thread reaches it later than a device that never waits."""
        self._stops = sorted({0, count, *(problem.point_ops[point] for point in points)})
        """The ops before which the thread stops."""
        self._work_at: list[float] = work[self._stops].tolist()
        self._thread_at: list[float] = at_op[self._stops].tolist()
        self._most_behind: list[float] = np.maximum.reduceat(self._behind, self._stops[:-1]).tolist() if count else []
        """Per stop: the largest ``_behind`` up to the next stop."""
        self._stop = 0
        self._taken_s = 0.0

    def reach(self, point: int) -> None:
        if self._point_ops[point] > self._stops[self._stop]:
            self._run_on()
        self.streams.wait_until(self._now_s())

    def finish(self) -> None:
        if self._stop < len(self._stops) - 1:
            self._run_on()
        self.streams.wait_until(self._now_s())

    def take(self, seconds: float) -> None:
        self._taken_s += seconds
        self.streams.wait_until(self._now_s())

    def replay(self, replay: MergedReplay, label: str) -> None:
        streams, cost = self.streams, self._cost
        start_s = self._now_s()
        launch_s, behind_s = cost.replay_of(replay, self._op_seconds)
        idle_s = start_s + behind_s - streams.now_s
        if idle_s <= 0.0:
            streams.compute(replay.seconds, Lane.REPLAY, label)
        elif streams.is_undisturbed and not streams.trace:
            streams.compute_between_waits(replay.seconds, idle_s)
        else:
            for op in replay.ops:
                start_s += cost.replay_s
                streams.wait_until(start_s)
                streams.compute(self._op_seconds[op], Lane.REPLAY, label)
                start_s += float(cost.launch_s[op])
        self._taken_s += launch_s

    def _now_s(self) -> float:
        return self._thread_at[self._stop] + self._taken_s

    def _run_on(self) -> None:
        """Runs to the next stop."""
        streams, stop = self.streams, self._stop
        work_s = self._work_at[stop + 1] - self._work_at[stop]
        if self._taken_s + self._most_behind[stop] + self._work_at[stop] <= streams.now_s:
            streams.compute(work_s)
        else:
            self._run_waiting(self._stops[stop], self._stops[stop + 1])
        self._stop += 1
        self.done_s = self._work_at[self._stop]

    def _run_waiting(self, begin: int, end: int) -> None:
        """Runs ops of which at least one waits for its launch; one by one while copies slow them."""
        streams, work = self.streams, self.work_before_op_s
        for op in range(begin, end):
            if streams.is_undisturbed and not streams.trace:
                idle_s = self._taken_s + float(self._behind[op:end].max()) + float(work[op]) - streams.now_s
                streams.compute_between_waits(float(work[end] - work[op]), max(0.0, idle_s))
                return
            streams.wait_until(self._taken_s + float(self._behind[op] + work[op]))
            streams.compute(self._op_seconds[op])


def recorded_before(problem: Problem, schedule: Schedule) -> Ints | None:
    """Ops recorded before each op, and in all; None if recording is off, or takes no time."""
    cost = problem.launch_cost
    if not cost.record_s:
        return None
    edges = [(0, "on")] if schedule.record_from_start else []
    for action in schedule.actions:
        if action.record and action.at == "save":
            edges.append((problem.point_ops[problem.save_points[action.index]], action.record))
    if not edges:
        return None
    is_recorded = np.zeros(len(problem.op_ticks), dtype=np.int64)
    for (begin, switch), (end, _) in zip(edges, [*edges[1:], (cost.last_save_op, "off")], strict=True):
        if switch == "on":
            is_recorded[begin:end] = 1
    return np.concatenate(([0], np.cumsum(is_recorded)))
