"""An independent judge of a plan's step time: runs its streams event by event, from the profile and the plan alone.

Written from ``docs/semantics.md``; shares no code with the planner, and with the oracle, which reads the planner's
``Problem``, only the clock. Compute, replays and waits are one stream; each direction of the link is a queue, first in,
first out. The launching thread is a clock of its own, or the compute stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from poochplan.formats.plan import Plan, PointActions, Prediction
from poochplan.formats.profile import LinkDirection, Profile

from .clock import Clock, run, take, wait

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


class _Thread:
    """The compute stream with its queues, and the launching thread: what it takes for what, and what is lost to it."""

    def __init__(self, profile: Profile, times: Times) -> None:
        cost = profile.runtime
        self.link, self.times, self.clock = profile.link, times, Clock(0.0, (), ())
        self.is_compute = cost is not None and profile.device.kind == "cpu"
        self.is_ahead = cost is not None and not self.is_compute
        self.unpack_s = self.pack_s = self.fetch_s = self.out_s = self.record_s = self.replay_s = self.launch_s = 0.0
        if cost is not None:
            self.unpack_s, self.pack_s = cost.unpack_s, cost.handle_s - cost.unpack_s
            self.fetch_s, self.out_s = cost.fetch_s, cost.swap_s - cost.fetch_s
            self.record_s, self.replay_s, self.launch_s = cost.record_s, cost.replay_s, cost.launch_s

    def take(self, seconds: float) -> None:
        """The thread works; on the CPU nothing is computed meanwhile, else what comes next is not queued before."""
        if self.is_compute:
            self.times.runtime_s += seconds
            self._compute(seconds)
        elif self.is_ahead:
            self.times.runtime_s += self._until(take(self.link, False, self.clock, seconds))

    def run_op(self, duration_s: float, own_s: float) -> None:
        """One op, for which the runtime takes ``own_s`` besides."""
        self.take(own_s)
        self._compute(duration_s)
        if self.is_ahead:
            self.clock = self.clock._replace(thread_s=self.clock.thread_s + min(self.launch_s, duration_s))

    def wait(self, index: int, *, is_out: bool) -> None:
        """Waits for the copy of a value, if it is not done."""
        self.times.stall_s += self._until(wait(self.link, self.clock, index, is_out=is_out))

    def _compute(self, work_s: float) -> None:
        """Computes, and loses seconds to the copies beside it."""
        self.times.interference_s += self._until(run(self.link, self.clock, work_s)) - work_s

    def _until(self, clock: Clock) -> float:
        """The seconds until then."""
        passed_s = clock.now_s - self.clock.now_s
        self.clock = clock
        return passed_s


class _Step:
    """Goes through the points of the step as the runtime does."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.times = Times()
        self.thread = _Thread(profile, self.times)
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
            self.thread.take(0.0)
            if action is not None:
                self._act(action)
            if kind == "use":
                self._bring(self.index_of[self.profile.handles[point.handle].value])
        self._run_ops(done, len(self.profile.ops))
        self.thread.take(0.0)
        self.times.step_s = self.thread.clock.now_s
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
            clock, copy = self.thread.clock, (index, self._copy_s(self.profile.link.outward, index))
            self.thread.clock = clock._replace(out=(*clock.out, copy))
        for index in action.release:
            self.thread.wait(index, is_out=True)
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
            clock, copy = self.thread.clock, (index, self._copy_s(self.profile.link.inward, index))
            self.thread.clock = clock._replace(inward=(*clock.inward, copy))

    def _bring(self, index: int) -> None:
        """The value is on the device from here on."""
        if self._recomputes(index):
            self._replay(index)
        else:
            self._fetch(index)
            self.thread.wait(index, is_out=False)

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
