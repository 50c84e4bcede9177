"""An independent judge of a plan's step time: the walk of the judge of bytes, with a clock, event by event.

Written from ``docs/semantics.md``; shares no code with the planner, and with the oracle, which reads the planner's
``Problem``, only the clock. Compute, replays and waits are one stream; each direction of the link is a queue, first in,
first out. The launching thread is a clock of its own, or the compute stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from poochplan.formats.plan import Plan, PointActions
from poochplan.formats.profile import LinkDirection, Profile

from .checker import Judge, Verdict
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


def check_times(profile: Profile, plan: Plan, prediction: object) -> Verdict:
    """What the judge of bytes says. Raises :class:`WrongTime` unless the attributes of ``prediction`` that are named as
    those of :class:`Times` are what the plan takes, to rounding.
    """
    judge = _Timed(profile, plan)
    verdict, found = judge.walk(), judge.times
    for field in fields(Times):
        wanted, predicted = getattr(found, field.name), getattr(prediction, field.name)
        if not abs(predicted - wanted) <= ROUNDING * found.step_s:
            raise WrongTime(f"{field.name}: the prediction says {predicted!r}, the plan takes {wanted!r}")
    return verdict


class _Timed(Judge):
    """The compute stream with its queues, and the launching thread: what it takes for what, and what is lost to it."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        cost = profile.runtime
        self.link, self.times, self.clock = profile.link, Times(), Clock(0.0, (), ())
        self.is_compute = cost is not None and profile.device.kind == "cpu"
        self.is_ahead = cost is not None and not self.is_compute
        self.unpack_s = self.pack_s = self.fetch_s = self.out_s = self.record_s = self.replay_s = self.drop_s = 0.0
        self.launches_s = [0.0] * len(profile.ops)
        if cost is not None:
            self.unpack_s, self.pack_s = cost.unpack_s, cost.handle_s - cost.unpack_s
            self.fetch_s, self.out_s = cost.fetch_s, cost.swap_s - cost.fetch_s
            self.record_s, self.replay_s, self.drop_s = cost.record_s, cost.replay_s, cost.drop_s
            thread_s = begins_s = 0.0
            for number, op in enumerate(profile.ops):
                begins_s += self.state.seconds[number]
                next_s = min(thread_s + cost.phase_launch_s.get(op.phase, cost.launch_s), begins_s)
                self.launches_s[number], thread_s = next_s - thread_s, next_s
        self.is_recording = plan.record_from_start

    def walk(self) -> Verdict:
        self._handles_before(0)
        verdict = super().walk()
        self._take(0.0)
        self.times.step_s = self.clock.now_s
        return verdict

    # -- what happens at a tick -------------------------------------------------------------------------------

    def _end_of_tick(self, tick: int) -> None:
        super()._end_of_tick(tick)
        what, number = self.timeline[tick]
        if what == "op":
            is_recorded = self.is_recording and number < self.save_ops[-1]
            self._run_op(number, self.record_s if is_recorded else 0.0)
            self._handles_before(number + 1)

    def _handles_before(self, op: int) -> None:
        """The packs and unpacks at the points before an op, ahead of all else that happens there."""
        for point in self.profile.points:
            if point.op == op and point.kind.value == "use":
                self._take(self.unpack_s)
            elif point.op == op:
                value = self.profile.handles[point.handle].value
                self._take(self.pack_s * sum(handle.value == value for handle in self.profile.handles))

    def _act(self, tick: int, action: PointActions | None) -> None:
        self._take(0.0)
        what, point = self.timeline[tick]
        if what == "point" and self.profile.points[point].kind.value == "save":
            self._take(self.drop_s if self.plan.values[self.done_saves].decision.value == "recompute" else 0.0)
        for index in action.swap_out if action else ():
            self._take(self.out_s)
            copy = index, self._copy_s(self.link.outward, index)
            self.clock = self.clock._replace(out=(*self.clock.out, copy))
        for index in action.release if action else ():
            self._wait(index, is_out=True)
        for index in action.prefetch if action else ():
            self._take(self.fetch_s)
            copy = index, self._copy_s(self.link.inward, index)
            self.clock = self.clock._replace(inward=(*self.clock.inward, copy))
        super()._act(tick, action)
        if action and action.record:
            self.is_recording = action.record == "on"

    def _copy_s(self, direction: LinkDirection, index: int) -> float:
        throttle = self.link.throttle_bytes_per_s or float("inf")
        size_bytes = self.values[self.saved[index]].size_bytes
        return direction.latency_s + size_bytes / min(direction.bandwidth_bytes_per_s, throttle)

    def _check_use(self, tick: int, handle: int) -> None:
        super()._check_use(tick, handle)
        self._wait(self.entry_of[self.profile.handles[handle].value], is_out=False)

    def _run(self, tick: int, ops: list[int], targets: set[int]) -> None:
        """Waits for what a replay starts from, and runs its ops."""
        wanted = {self.saved[target] for target in targets}
        read = {(value, op) for op in ops for value in (*self.profile.ops[op].inputs, *self.profile.ops[op].writes)}
        found = {value for value, op in read if self._found_elsewhere(value, op, wanted)}
        for source in sorted(self.entry_of[value] for value in found & self.entry_of.keys()):
            self._wait(source, is_out=False)
        for op in ops:
            self.times.replay_s += self.profile.ops[op].duration_s
            self._run_op(op, self.replay_s)
        super()._run(tick, ops, targets)

    # -- seconds ----------------------------------------------------------------------------------------------

    def _take(self, seconds: float) -> None:
        """The thread works; on the CPU nothing is computed meanwhile, else what comes next is not queued before."""
        if self.is_compute:
            self.times.runtime_s += seconds
            self._compute(seconds)
        elif self.is_ahead:
            self.times.runtime_s += self._until(take(self.link, False, self.clock, seconds))

    def _run_op(self, number: int, own_s: float) -> None:
        """One op, for which the runtime takes ``own_s`` besides."""
        self._take(own_s)
        self._compute(self.state.seconds[number])
        if self.is_ahead:
            self.clock = self.clock._replace(thread_s=self.clock.thread_s + self.launches_s[number])

    def _wait(self, index: int, *, is_out: bool) -> None:
        """Waits for the copy of a value, if it is on its way."""
        self.times.stall_s += self._until(wait(self.link, self.clock, index, is_out=is_out))

    def _compute(self, work_s: float) -> None:
        """Computes, and loses seconds to the copies beside it."""
        self.times.interference_s += self._until(run(self.link, self.clock, work_s)) - work_s

    def _until(self, clock: Clock) -> float:
        """The seconds until then."""
        passed_s = clock.now_s - self.clock.now_s
        self.clock = clock
        return passed_s
