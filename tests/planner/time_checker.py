"""An independent judge of a plan's step time: runs its streams event by event, from the profile and the plan alone.

Written from ``docs/semantics.md``; shares no code with the planner, nor with the oracle, which reads the planner's
``Problem``. Compute, replays and waits are one stream; each direction of the link is a queue, first in, first out. The
launching thread is a clock of its own, or the compute stream itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from poochplan.formats.plan import Plan, PointActions, Prediction
from poochplan.formats.profile import LinkDirection, Profile

ROUNDING = 1e-9
"""Relative difference that the order of additions may make."""


class WrongTime(AssertionError):
    """The prediction says another time than the step takes."""


@dataclass
class Times:
    """Seconds of a step, named as in ``Prediction``."""

    step_s: float = 0.0
    stall_s: float = 0.0
    replay_s: float = 0.0
    interference_s: float = 0.0
    runtime_s: float = 0.0


def times_of(profile: Profile, plan: Plan) -> Times:
    """What the step takes under the plan."""
    return _Step(profile, plan).run()


def check_times(profile: Profile, plan: Plan, prediction: Prediction) -> None:
    """Raises :class:`WrongTime` unless all five predicted times are those of the plan, to rounding."""
    found = times_of(profile, plan)
    for field in fields(Times):
        wanted, predicted = getattr(found, field.name), getattr(prediction, field.name)
        if not abs(predicted - wanted) <= ROUNDING * found.step_s:
            raise WrongTime(f"{field.name}: the prediction says {predicted!r}, the plan takes {wanted!r}")


class _Machine:
    """One compute stream and two queues of [value, seconds alone on the link that are left]."""

    def __init__(self, profile: Profile) -> None:
        self.link = profile.link
        self.out: deque[list[float]] = deque()
        self.inward: deque[list[float]] = deque()
        self.now_s = 0.0

    def compute(self, work_s: float) -> float:
        """Computes; the seconds lost to the copies beside it."""
        start_s, left_s = self.now_s, work_s
        while left_s > 0.0:
            slowness = 1.0
            if self.out:
                slowness += self.link.interference_out
            if self.inward:
                slowness += self.link.interference_in
            until_copy_s = self._until_a_copy_ends()
            if left_s * slowness <= until_copy_s:
                self._let_pass(left_s * slowness)
                left_s = 0.0
            else:
                self._let_pass(until_copy_s)
                left_s -= until_copy_s / slowness
        return self.now_s - start_s - work_s

    def idle(self, until_s: float) -> float:
        """Nothing is there to compute before then; the seconds that takes."""
        start_s = self.now_s
        while self.now_s < until_s:
            self._let_pass(min(until_s - self.now_s, self._until_a_copy_ends()))
        return self.now_s - start_s

    def wait(self, queue: deque[list[float]], value: int) -> float:
        """Waits for the copy of a value, if it is not done; the seconds that takes."""
        start_s = self.now_s
        while any(queued == value for queued, _ in queue):
            self._let_pass(self._until_a_copy_ends())
        return self.now_s - start_s

    def _rate(self) -> float:
        return self.link.duplex if self.out and self.inward else 1.0

    def _until_a_copy_ends(self) -> float:
        return min([queue[0][1] / self._rate() for queue in (self.out, self.inward) if queue], default=float("inf"))

    def _let_pass(self, seconds: float) -> None:
        rate = self._rate()
        self.now_s += seconds
        for queue in (self.out, self.inward):
            if queue:
                is_over = queue[0][1] / rate <= seconds
                queue[0][1] -= seconds * rate
                if is_over:
                    queue.popleft()


class _Thread:
    """The launching thread: its clock, what it takes for what, and what the compute stream loses to it."""

    def __init__(self, profile: Profile, machine: _Machine, times: Times) -> None:
        cost = profile.runtime
        self.machine, self.times = machine, times
        self.is_compute = cost is not None and profile.device.kind == "cpu"
        self.is_ahead = cost is not None and not self.is_compute
        self.now_s = 0.0
        self.unpack_s = self.pack_s = self.fetch_s = self.out_s = self.record_s = self.replay_s = self.launch_s = 0.0
        if cost is not None:
            self.unpack_s, self.pack_s = cost.unpack_s, cost.handle_s - cost.unpack_s
            self.fetch_s, self.out_s = cost.fetch_s, cost.swap_s - cost.fetch_s
            self.record_s, self.replay_s, self.launch_s = cost.record_s, cost.replay_s, cost.launch_s

    def take(self, seconds: float) -> None:
        """The thread works; on the CPU nothing is computed meanwhile, else what comes next is not queued before."""
        if self.is_compute:
            self.times.runtime_s += seconds
            self.times.interference_s += self.machine.compute(seconds)
        elif self.is_ahead:
            self.now_s += seconds
            self.catch_up()

    def catch_up(self) -> None:
        if self.is_ahead:
            self.times.runtime_s += self.machine.idle(self.now_s)

    def run_op(self, duration_s: float, own_s: float) -> None:
        """One op, for which the runtime takes ``own_s`` besides."""
        self.take(own_s)
        self.times.interference_s += self.machine.compute(duration_s)
        self.now_s += min(self.launch_s, duration_s) if self.is_ahead else 0.0


class _Step:
    """Goes through the points of the step as the runtime does."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.machine, self.times = _Machine(profile), Times()
        self.thread = _Thread(profile, self.machine, self.times)
        self.is_recording = plan.record_from_start
        saves = [point for point in profile.points if point.kind.value == "save"]
        self.last_save_op = max(point.op for point in saves)
        self.saved = [profile.handles[point.handle].value for point in saves]
        self.index_of = {value: index for index, value in enumerate(self.saved)}
        self.writers: dict[int, list[int]] = {value: [] for value in range(len(profile.values))}
        for number, op in enumerate(profile.ops):
            for value in (*op.outputs, *op.writes) if op.phase.value == "forward" else ():
                self.writers[value].append(number)
        self.version_saved = [self._version(self.saved[i], point.op) for i, point in enumerate(saves)]
        self.away = {index for index, value in enumerate(plan.values) if value.decision.value == "recompute"}
        """Values that are not on the device: released ones, and those to be recomputed."""

    def run(self) -> Times:
        actions = {(action.at, action.index): action for action in self.plan.schedule}
        counts = {"save": 0, "use": 0}
        done = 0
        self._handles_before(0)
        for point in self.profile.points:
            self._run_ops(done, point.op)
            done, kind = point.op, point.kind.value
            action = actions.get((kind, counts[kind]))
            counts[kind] += 1
            self.thread.catch_up()
            if action is not None:
                self._act(action)
            if kind == "use":
                self._bring(self.index_of[self.profile.handles[point.handle].value])
        self._run_ops(done, len(self.profile.ops))
        self.thread.catch_up()
        self.times.step_s = self.machine.now_s
        return self.times

    def _run_ops(self, begin: int, end: int) -> None:
        thread = self.thread
        for number in range(begin, end):
            is_recorded = self.is_recording and number < self.last_save_op
            thread.run_op(self.profile.ops[number].duration_s, thread.record_s if is_recorded else 0.0)
            self._handles_before(number + 1)

    def _handles_before(self, op: int) -> None:
        """The packs and unpacks at the points before an op, ahead of all else that happens there."""
        for point in self.profile.points:
            if point.op == op and point.kind.value == "use":
                self.thread.take(self.thread.unpack_s)
            elif point.op == op:
                value = self.profile.handles[point.handle].value
                self.thread.take(self.thread.pack_s * sum(handle.value == value for handle in self.profile.handles))

    def _act(self, action: PointActions) -> None:
        for index in action.swap_out:
            self.thread.take(self.thread.out_s)
            self.machine.out.append([index, self._copy_s(self.profile.link.outward, index)])
        for index in action.release:
            self.times.stall_s += self.machine.wait(self.machine.out, index)
            self.away.add(index)
        for index in action.prefetch:
            self._fetch(index)
        for index in action.replay:
            self._replay(index)
        if action.record:
            self.is_recording = action.record == "on"

    def _copy_s(self, direction: LinkDirection, index: int) -> float:
        throttle = self.profile.link.throttle_bytes_per_s or float("inf")
        size_bytes = self.profile.values[self.saved[index]].size_bytes
        return direction.latency_s + size_bytes / min(direction.bandwidth_bytes_per_s, throttle)

    def _recomputes(self, index: int) -> bool:
        return self.plan.values[index].decision.value == "recompute"

    def _fetch(self, index: int) -> None:
        """Queues the copy back of a value that was released and not fetched."""
        if index in self.away and not self._recomputes(index):
            self.away.remove(index)
            self.thread.take(self.thread.fetch_s)
            self.machine.inward.append([index, self._copy_s(self.profile.link.inward, index)])

    def _bring(self, index: int) -> None:
        """The value is on the device from here on."""
        if self._recomputes(index):
            self._replay(index)
        else:
            self._fetch(index)
            self.times.stall_s += self.machine.wait(self.machine.inward, index)

    # -- replays ----------------------------------------------------------------------------------------------

    def _version(self, value: int, op: int) -> int:
        return sum(writer < op for writer in self.writers[value])

    def _replay(self, index: int) -> None:
        if index not in self.away:
            return
        ops: set[int] = set()
        copies: set[int] = set()
        self._need(self.saved[index], self.version_saved[index], ops, copies)
        for source in sorted(copies):
            self._bring(source)
        for op in sorted(ops):
            work_s = self.profile.ops[op].duration_s
            self.times.replay_s += work_s
            self.thread.run_op(work_s, self.thread.replay_s)

    def _need(self, value: int, version: int, ops: set[int], copies: set[int]) -> None:
        """Adds the ops that give this content of a value, and the saved values that they start from."""
        if self.profile.values[value].born < 0:
            return
        index = self.index_of.get(value)
        if index is not None and self.version_saved[index] == version:
            if not self._recomputes(index):
                copies.add(index)
                return
            if index not in self.away:
                return
            self.away.remove(index)  # it comes back in this replay, and stays
        for writer in self.writers[value][:version]:
            if writer not in ops:
                ops.add(writer)
                op = self.profile.ops[writer]
                for read in {*op.inputs, *op.writes}:
                    self._need(read, self._version(read, writer), ops, copies)
