"""The simulator: memory and time of a schedule; and candidate plans: decisions that were scheduled and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Floats, Ints
from poochplan.formats.plan import Decision
from poochplan.planner.simulator.construct import (
    claim_for_never_replayed,
    fit,
    inside_replays,
    lives,
    memory_of,
    replay_for,
)
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.replays import MergedReplay, in_order
from poochplan.planner.simulator.schedule import AS_STYLED, Schedule, Style, Tuning
from poochplan.planner.simulator.streams import AheadThread, Span, Streams, Thread, recorded_before


class Wait(NamedTuple):
    """The compute stream waits for a copy of ``value`` at a point."""

    point: int
    value: int
    is_out: bool
    seconds: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """The results of a schedule."""

    peak_bytes: int
    first_step_peak_bytes: int
    peak_tick: int
    peak_layer: str
    memory_bytes: Ints
    """Most bytes live at each tick, including inside replays."""
    step_s: float
    stall_s: float
    """Seconds the compute stream waits for copies."""
    replay_s: float
    interference_s: float
    """Seconds lost because compute runs slower beside copies."""
    out_bytes: int
    in_bytes: int
    runtime_s: float = 0.0
    """Seconds of the compute stream for the runtime itself, or in waits for launches."""
    waits: tuple[Wait, ...] = ()
    """The waits of the compute stream, in order."""
    trace: tuple[Span, ...] = ()
    """Compute, stalls, replays and copies, for pictures; empty unless requested."""
    tick_start_s: Floats = field(default_factory=lambda: np.zeros(0))
    """Beginning of each tick in seconds; empty unless a trace was requested."""


class _Do(StrEnum):
    DROP = "drop"
    OUT = "out"
    WAIT_OUT = "wait_out"
    IN = "in"
    WAIT_IN = "wait_in"
    REPLAY = "replay"


def simulate(problem: Problem, schedule: Schedule, *, trace: bool = False) -> Simulation:
    """Runs ``schedule`` by the exact semantics. ``trace`` adds the data for a picture."""
    walk = Walk(problem, schedule)
    memory = memory_of(problem, walk.lives, walk.replays)
    peak_tick = int(np.argmax(memory))
    streams, recording_s, waits, tick_start_s = _time(problem, schedule, walk, trace)
    replay_s = in_order(replay.seconds for _, replay in walk.replays)
    added_s = streams.runtime_s + recording_s
    return Simulation(
        peak_bytes=int(memory[peak_tick]),
        first_step_peak_bytes=int((memory - problem.first_step_less_bytes).max()),
        peak_tick=peak_tick,
        peak_layer=problem.layer_at(peak_tick),
        memory_bytes=memory,
        step_s=problem.step_s + replay_s + streams.stall_s + streams.interference_s + added_s,
        stall_s=streams.stall_s,
        replay_s=replay_s,
        interference_s=streams.interference_s,
        out_bytes=sum(int(problem.size_bytes[value]) for value in walk.copied_out),
        in_bytes=sum(int(problem.size_bytes[value]) for value in walk.copied_in),
        runtime_s=problem.step_s - problem.in_core_s + added_s,
        waits=waits,
        trace=tuple(sorted(streams.spans, key=lambda span: span.start_s)),
        tick_start_s=tick_start_s,
    )


class Walk:
    """Goes through the points once, like the runtime. It records where each value is and which actions were done.

    A value is resident until it is released; a recomputed one is away from its forward death to its replay.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.decisions = problem, schedule.decisions
        count = problem.value_count
        self.back_tick = [-1] * count
        self.release_tick = [-1] * count
        self.claim: Ints = np.full(count, -1, dtype=np.int64)
        self.is_arriving = [False] * count
        self.commands: list[tuple[int, _Do, int]] = []
        """(point, action, value); for a replay, its position in ``replays`` in place of the value."""
        self.replays: list[tuple[int, MergedReplay]] = []
        """Each with its tick, in the order in which they run."""
        self.copied_out: list[int] = []
        self.copied_in: list[int] = []
        self._run(schedule)

    def _run(self, schedule: Schedule) -> None:
        problem = self.problem
        points = problem.save_points, problem.use_points
        actions = {points[action.at == "use"][action.index]: action for action in schedule.actions}
        first_uses = {
            point: value
            for value, point in enumerate(problem.first_use_point)
            if point >= 0 and self.decisions[value] is not Decision.KEEP
        }
        drops = dict[int, int]()
        if problem.launch_cost.drop_s:
            dropped = (value for value, one in enumerate(self.decisions) if one is Decision.RECOMPUTE)
            drops = {problem.save_points[value]: value for value in dropped}
        for point in sorted({*actions, *first_uses, *drops}):
            if point in drops:
                self.commands.append((point, _Do.DROP, drops[point]))
            action = actions.get(point)
            if action is not None:
                for value in action.swap_out:
                    self.commands.append((point, _Do.OUT, value))
                    self.copied_out.append(value)
                for value in action.release:
                    self.commands.append((point, _Do.WAIT_OUT, value))
                    self.release_tick[value] = int(problem.point_ticks[point])
                for value in action.prefetch:
                    self._fetch(point, value)
                for value in action.replay:
                    self._replay(point, value)
            used = first_uses.get(point, -1)
            if used >= 0 and self.decisions[used] is Decision.RECOMPUTE:
                self._replay(point, used)
            elif used >= 0:
                self._fetch(point, used)
                self._wait(point, used)
        claim_for_never_replayed(problem, self.decisions, self.back_tick, self.claim)
        self.lives = lives(problem, self.decisions, self.claim, self.release_tick, self.back_tick)

    def _fetch(self, point: int, value: int) -> None:
        if self.release_tick[value] >= 0 and self.back_tick[value] < 0:
            self.back_tick[value] = int(self.problem.point_ticks[point])
            self.is_arriving[value] = True
            self.commands.append((point, _Do.IN, value))
            self.copied_in.append(value)

    def _wait(self, point: int, value: int) -> None:
        if self.is_arriving[value]:
            self.is_arriving[value] = False
            self.commands.append((point, _Do.WAIT_IN, value))

    def _replay(self, point: int, value: int) -> None:
        if self.back_tick[value] >= 0:
            return
        tick = int(self.problem.point_ticks[point])
        replay = replay_for(self.problem, self.decisions, value, self.back_tick)
        for source in replay.inputs:
            self._fetch(point, source)
            self._wait(point, source)
        for target in replay.targets:
            self.back_tick[target] = tick
            for source in self.problem.replay.of(target).inputs:
                self.claim[source] = max(self.claim[source], tick)
        self.commands.append((point, _Do.REPLAY, len(self.replays)))
        self.replays.append((tick, replay))


def _time(
    problem: Problem, schedule: Schedule, walk: Walk, trace: bool
) -> tuple[Streams, float, tuple[Wait, ...], Floats]:
    """The streams at the end of the step, seconds of recording in the compute stream's work, the waits for copies, and
    the beginning of each tick.
    """
    streams, cost = Streams(problem.link, trace), problem.launch_cost
    recorded = recorded_before(problem, schedule)
    thread = Thread(problem, streams, recorded)
    if not cost.is_compute:
        thread = AheadThread(problem, streams, recorded, (point for point, _, _ in walk.commands))
    waits: list[Wait] = []
    here = -1
    for point, what, value in walk.commands:
        if point != here:
            thread.reach(point)
            here = point
        if what is _Do.DROP:
            thread.take(cost.drop_s)
        elif what is _Do.OUT:
            thread.take(cost.out_s)
            streams.queue(value, problem.out_seconds(value), problem.names[value], is_out=True)
        elif what is _Do.IN:
            thread.take(cost.fetch_s)
            streams.queue(value, problem.in_seconds(value), problem.names[value], is_out=False)
        elif what is _Do.REPLAY:
            replay = walk.replays[value][1]
            thread.replay(replay, ", ".join(problem.names[target] for target in replay.targets) if trace else "")
        else:
            is_out, stalled_s = what is _Do.WAIT_OUT, streams.stall_s
            streams.wait(value, problem.names[value], is_out=is_out)
            if streams.stall_s > stalled_s:
                waits.append(Wait(point, value, is_out, streams.stall_s - stalled_s))
        if trace:
            streams.mark(int(problem.point_ticks[point]), thread.done_s)
    thread.finish()
    starts = _tick_starts(problem, streams, thread.work_before_op_s) if trace else np.zeros(0)
    return streams, thread.recording_s, tuple(waits), starts


def _tick_starts(problem: Problem, streams: Streams, work_before_op_s: Floats) -> Floats:
    """Wall time at which each tick begins."""
    work = np.zeros(problem.tick_count)
    work[problem.op_ticks] = work_before_op_s[:-1]
    work[problem.point_ticks] = work_before_op_s[list(problem.point_ops)]
    starts = np.zeros(problem.tick_count)
    marks = [(-1, 0.0, 0.0), *streams.marks, (problem.tick_count, float(work_before_op_s[-1]), streams.now_s)]
    for (tick, work_s, wall_s), (next_tick, _, _) in pairwise(marks):
        # Between two marks the compute stream never waits, so wall time is a function of work done.
        inside = [(w, t) for w, t in streams.progress if work_s < w and t > wall_s]
        x, y = [work_s, *(w for w, _ in inside)], [wall_s, *(t for _, t in inside)]
        ticks = slice(tick + 1, min(next_tick, problem.tick_count - 1) + 1)
        starts[ticks] = np.interp(work[ticks], x, y)
    return starts


def held_at(problem: Problem, schedule: Schedule, tick: int) -> tuple[list[int], MergedReplay | None]:
    """What the simulator counts, in addition to ``problem.base_bytes``, when most bytes are live at ``tick``: saved
    values on the device, each as often as it is there (a copy may be back before the first life has ended); and the
    replay that contains that moment, whose targets are in its ``peak_bytes``, and not in the list.
    """
    walk = Walk(problem, schedule)
    first_end, back, end = walk.lives
    first = np.flatnonzero((problem.born <= tick) & (tick <= first_end))
    again = np.flatnonzero((back >= 0) & (back <= tick) & (tick <= end))
    saved = [*first.tolist(), *again.tolist()]
    there = [replay for at, replay in walk.replays if at == tick]
    after_bytes = int(problem.base_bytes[tick]) + int(problem.rounded_bytes[saved].sum())
    inside = inside_replays(problem, there, after_bytes)
    if not inside or max(inside) <= after_bytes:
        return saved, None
    at = inside.index(max(inside))
    for replay in there[at:]:
        for target in replay.targets:
            saved.remove(target)
    return saved, there[at]


ON_DEMAND = Style(release="early", prefetch="on_demand")
STYLES = (Style(), Style(in_order=False), Style(release="early"))


@dataclass(frozen=True, eq=False)
class Candidate:
    """One plan that was tried: the source of its decisions, its schedule, and the results."""

    policy: str
    wish: tuple[Decision, ...]
    """The requested decisions. The schedule keeps swapped values that need no release."""
    schedule: Schedule
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        return max(self.simulation.peak_bytes, self.simulation.first_step_peak_bytes)

    def rank(self, budget_bytes: int) -> tuple[int, float, int]:
        """Smaller is better: bytes over budget, then step time, then bytes moved."""
        simulation = self.simulation
        moved = simulation.out_bytes + simulation.in_bytes
        return max(0, self.peak_bytes - budget_bytes), simulation.step_s, moved


def simulated(problem: Problem, policy: str, schedule: Schedule) -> Candidate:
    """Simulates an existing schedule."""
    return Candidate(policy, schedule.decisions, schedule, simulate(problem, schedule))


def movable(problem: Problem) -> list[int]:
    """Saved values, and sources, that may be swapped or recomputed."""
    return [value for value, reason in enumerate(problem.must_keep) if not reason]


def try_style(
    problem: Problem,
    policy: str,
    wish: Sequence[Decision],
    budget_bytes: int,
    style: Style,
    tuning: Tuning = AS_STYLED,
) -> Candidate:
    """Schedules decisions in one style, and simulates them."""
    schedule = fit(problem, wish, budget_bytes, style, tuning)
    return Candidate(policy, tuple(wish), schedule, simulate(problem, schedule))


def try_decisions(
    problem: Problem, policy: str, wish: Sequence[Decision], budget_bytes: int, styles: Sequence[Style] = STYLES
) -> Candidate:
    """Schedules decisions in each style; returns the best result."""
    tried = [try_style(problem, policy, wish, budget_bytes, style) for style in styles]
    return min(tried, key=lambda candidate: candidate.rank(budget_bytes))


def swap_all(problem: Problem) -> tuple[Decision, ...]:
    """Swaps every value that may be swapped, except for sources: no replay starts from them."""
    return tuple(
        Decision.KEEP if reason or value in problem.copies else Decision.SWAP
        for value, reason in enumerate(problem.must_keep)
    )


def swap_all_on_demand(problem: Problem) -> Candidate:
    """Every value leaves as soon as it can and comes back when it is used.

    Each saved value is live in its forward life and from its first use to its last, as it is in every plan: no plan of
    this planner has a smaller peak.
    """
    return try_style(problem, "swap-all on demand", swap_all(problem), 0, ON_DEMAND)


def least_step_s(problem: Problem, wish: Sequence[Decision]) -> float:
    """No schedule of these decisions has a shorter step: each op of recomputed values that backward uses runs once."""
    ops: set[int] = set()
    for value, decision in enumerate(wish):
        replay = problem.replay.replays[value]
        if decision is Decision.RECOMPUTE and replay is not None and problem.first_use_point[value] >= 0:
            ops.update(replay.ops)
    added_s = sum(problem.replay.op_seconds[op] for op in sorted(ops))
    if problem.launch_cost.is_compute:
        added_s += problem.launch_cost.replay_s * len(ops)
    return max(problem.step_s + added_s, problem.keep_all_s)
