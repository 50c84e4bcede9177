"""The launching thread in a simulated step: how it brings the compute stream to each point, by the profile's device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poochplan.planner.problem.arrays import Floats, Ints
from poochplan.planner.problem.lane import HostLane
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule

from .streams import Streams


class Thread:
    """A thread that takes nothing: the compute stream is all there is."""

    def __init__(self, problem: Problem, streams: Streams) -> None:
        self.streams = streams
        self.work_before_op_s: Floats = problem.work_before_op_s
        self.recording_s = 0.0
        """What recording adds to the compute stream's work."""
        self.done_s = 0.0
        """Work done so far, replays and what is taken at points apart."""
        self._point_work = problem.point_work_list

    def reach(self, point: int) -> None:
        """All that comes before the point has been done."""
        work_s = self._point_work[point]
        if work_s > self.done_s:
            self.streams.compute(work_s - self.done_s)
            self.done_s = work_s

    def take(self, seconds: float) -> None:
        """The runtime's own work at a point."""

    def replay(self, targets: tuple[int, ...], ops: tuple[int, ...], seconds: float, label: str) -> None:
        """Runs the ops that bring ``targets`` back, ``seconds`` together."""
        self.streams.replay(seconds, label)

    def finish(self) -> None:
        """The rest of the step."""
        self.streams.compute(float(self.work_before_op_s[-1]) - self.done_s)


class ComputingThread(Thread):
    """A thread that is the compute stream, as on the CPU: what it takes is work like that of ops."""

    def __init__(self, problem: Problem, lane: HostLane, streams: Streams, recorded: Ints | None) -> None:
        super().__init__(problem, streams)
        self._replay_s = lane.replay_s
        if recorded is not None:
            self.work_before_op_s = problem.work_before_op_s + lane.record_s * recorded
            self.recording_s = lane.record_s * int(recorded[-1])
            self._point_work = self.work_before_op_s[problem.point_op_array].tolist()

    def take(self, seconds: float) -> None:
        self.streams.spend(seconds)

    def replay(self, targets: tuple[int, ...], ops: tuple[int, ...], seconds: float, label: str) -> None:
        self.streams.replay(seconds, label)
        self.streams.spend(self._replay_s * len(ops))


class AheadThread(Thread):
    """A thread that the device works behind: what it launches starts when it is launched and the device is free.

    Between two points every op starts at the later of the two. Without copies that slow it, all of them together end by
    how far the thread is behind the op that it is the furthest behind of.
    """

    def __init__(
        self, problem: Problem, lane: HostLane, streams: Streams, recorded: Ints | None, points: Sequence[int]
    ) -> None:
        super().__init__(problem, streams)
        self._lane, self._op_seconds, self._point_ops = lane, problem.replay.op_seconds, problem.point_ops
        at_op = lane.before_op_s if recorded is None else lane.before_op_s + lane.record_s * recorded
        launched = at_op[:-1] if recorded is None else at_op[:-1] + lane.record_s * np.diff(recorded)
        work, count = self.work_before_op_s, len(launched)
        self._behind: Floats = launched - work[:-1]
        """Per op: by how much the thread comes to it later than a device would that never waits."""
        self._stops = sorted({0, count, *(problem.point_ops[point] for point in points)})
        """The ops before which the thread stops, at ``points``."""
        self._work_at: list[float] = work[self._stops].tolist()
        self._thread_at: list[float] = at_op[self._stops].tolist()
        self._most_behind: list[float] = np.maximum.reduceat(self._behind, self._stops[:-1]).tolist() if count else []
        """Per stop: the most of ``_behind`` up to the next one."""
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

    def replay(self, targets: tuple[int, ...], ops: tuple[int, ...], seconds: float, label: str) -> None:
        streams, lane = self.streams, self._lane
        start_s = self._now_s()
        launch_s, behind_s = lane.replay_of(targets, ops, self._op_seconds)
        idle_s = start_s + behind_s - streams.now_s
        if idle_s <= 0.0:
            streams.replay(seconds, label)
        elif streams.is_undisturbed and not streams.trace:
            streams.compute_between_waits(seconds, idle_s)
        else:
            for op in ops:
                start_s += lane.replay_s
                streams.wait_until(start_s)
                streams.replay(self._op_seconds[op], label)
                start_s += float(lane.launch_s[op])
        self._taken_s += launch_s

    def _now_s(self) -> float:
        return self._thread_at[self._stop] + self._taken_s

    def _run_on(self) -> None:
        """To the next stop."""
        streams, stop = self.streams, self._stop
        work_s = self._work_at[stop + 1] - self._work_at[stop]
        if self._taken_s + self._most_behind[stop] + self._work_at[stop] <= streams.now_s:
            streams.compute(work_s)
        else:
            self._run_waiting(self._stops[stop], self._stops[stop + 1])
        self._stop += 1
        self.done_s = self._work_at[self._stop]

    def _run_waiting(self, begin: int, end: int) -> None:
        """Ops of which one at least waits for its launch; one after another while copies slow them."""
        streams, work = self.streams, self.work_before_op_s
        for op in range(begin, end):
            if streams.is_undisturbed and not streams.trace:
                idle_s = self._taken_s + float(self._behind[op:end].max()) + float(work[op]) - streams.now_s
                streams.compute_between_waits(float(work[end] - work[op]), max(0.0, idle_s))
                return
            streams.wait_until(self._taken_s + float(self._behind[op] + work[op]))
            streams.compute(self._op_seconds[op])


def thread_for(problem: Problem, streams: Streams, recorded: Ints | None, points: Sequence[int]) -> Thread:
    """The thread of a step that does something at ``points``, in their order."""
    lane = problem.lane
    if lane is None:
        return Thread(problem, streams)
    if lane.is_compute:
        return ComputingThread(problem, lane, streams, recorded)
    return AheadThread(problem, lane, streams, recorded, points)


def recorded_before(problem: Problem, schedule: Schedule) -> Ints | None:
    """Ops recorded before each op, and in all; None where recording is off, or takes nothing."""
    lane = problem.lane
    if lane is None or not lane.record_s:
        return None
    edges = [(0, "on")] if schedule.record_from_start else []
    for action in schedule.actions:
        if action.record and action.at == "save":
            edges.append((problem.point_ops[problem.save_points[action.index]], action.record))
    if not edges:
        return None
    is_recorded = np.zeros(len(problem.op_ticks), dtype=np.int64)
    for (begin, switch), (end, _) in zip(edges, [*edges[1:], (lane.last_save_op, "off")], strict=True):
        if switch == "on":
            is_recorded[begin:end] = 1
    return np.concatenate(([0], np.cumsum(is_recorded)))
