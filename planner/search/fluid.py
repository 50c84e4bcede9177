"""The fluid models' data: the request for a model, and its columns by their meaning.

In these models decisions are chosen, and copies move any share of a value. PLAN decides and may restrict. BOUND only
relaxes, so no plan is faster than its optimum. The two differ in a few rows, which the files of constraints add.
docs/planner.md lists the rows and gives the argument for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Floats, Ints
from poochplan.planner.search.solvers import LinearModel, Term
from poochplan.planner.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class Slots:
    """Stretches of compute between clock points that do not coincide in time."""

    first_point: tuple[int, ...]
    """First point of each slot."""
    seconds: Floats
    of_point: tuple[int, ...]
    start_tick: Ints
    first_backward: int
    """First slot that has a use point."""

    last_point_tick: Ints
    """Tick of the last point of each slot: the actions of the slot's points are done after it."""

    @property
    def count(self) -> int:
        return len(self.first_point)

    def at_tick(self, tick: int) -> int:
        """The slot that holds a tick; 0 for a tick before the first point."""
        return max(0, bisect_right(self._starts, tick) - 1)

    @cached_property
    def _starts(self) -> list[int]:
        return list(map(int, self.start_tick))


def slots_of(problem: Problem) -> Slots:
    """Combines the clock points to slots."""
    first: list[int] = []
    of_point: list[int] = []
    for index, work_s in enumerate(problem.point_work_s):
        if not first or work_s > problem.point_work_s[first[-1]]:
            first.append(index)
        of_point.append(len(first) - 1)
    starts = problem.point_work_s[first]
    backward = [of_point[point] for point in problem.use_points]
    return Slots(
        first_point=tuple(first),
        seconds=np.diff(np.append(starts, problem.step_s)),
        of_point=tuple(of_point),
        start_tick=problem.point_ticks[first],
        first_backward=min(backward, default=len(first)),
        last_point_tick=problem.point_ticks[[*(point - 1 for point in first[1:]), len(of_point) - 1]],
    )


WINDOW_NEEDS = 30
"""A value may be brought back at this many of the last points with replays before its own use."""

MANY, MANY_NEEDS = 1000, 4
"""With more values than the first number, PLAN has only the second number of points. Its relaxation has the same
results, in a tenth of the time."""


class Purpose(StrEnum):
    """What the model is for."""

    PLAN = "plan"
    BOUND = "bound"


@dataclass(frozen=True)
class Early:
    """A point before a value's own use by which the value may be back, because a replay needs it."""

    slot: int
    replayed: int | None
    """Column "recomputed by then"; None if the value cannot be recomputed."""
    fetched: int | None
    """Column "swapped in by then"; None if no replay would start from it there."""


@dataclass(frozen=True)
class Request:
    """The request for a model."""

    budget_bytes: int
    candidates: tuple[int, ...]
    """Values that may be swapped or recomputed."""
    purpose: Purpose = Purpose.PLAN
    host_bytes: int | None = None
    window: int = WINDOW_NEEDS
    whole: tuple[int, ...] = ()
    """Values, all of them candidates, that PLAN moves in one piece; see ``whole_buffers.py``."""
    free: tuple[int, ...] = ()
    """Values, none of them candidates, that leave and return at no cost in BOUND."""
    grid: int = 30
    """Most slots at which these leave and return."""


@dataclass(eq=False)
class FluidModel:
    """The model under construction: columns by their meaning. ``unit`` bytes and ``time_unit_s`` are 1 in it."""

    problem: Problem
    request: Request
    slots: Slots
    unit: float
    time_unit_s: float
    linear: LinearModel = field(default_factory=LinearModel)
    swap: dict[int, int] = field(default_factory=dict)
    recompute: dict[int, int] = field(default_factory=dict)
    early: dict[int, list[Early]] = field(default_factory=dict)
    """Ascending by slot, all before the value's own use."""
    consumers: dict[int, list[int]] = field(default_factory=dict)
    """Per value: the recomputable values whose replay starts from it."""
    replayed_ahead: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Per backward slot, in BOUND: columns of seconds of replays without a return up to the slot, and bytes per
    second."""
    extra: list[int] = field(default_factory=list)
    """Per slot: time the step takes beyond its compute (stalls and replays)."""
    not_out: list[int] = field(default_factory=list)
    """Per slot: bytes to be swapped that have not left."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Per backward slot: bytes that are back before they are needed, after its points."""
    arriving: dict[int, int] = field(default_factory=dict)
    """Per backward slot: bytes that arrive during its compute."""

    def __post_init__(self) -> None:
        problem, slots = self.problem, self.slots
        is_bound = self.request.purpose is Purpose.BOUND
        moved_bytes = problem.size_bytes if is_bound else problem.rounded_bytes
        self.resident = [float(size) / self.unit for size in problem.rounded_bytes]
        """Per value: scaled bytes it takes on the device."""
        self.moved = [float(size) / self.unit for size in moved_bytes]
        """Per value: scaled bytes of a copy of it."""
        self.use_slot = [slots.of_point[p] if p >= 0 else slots.count for p in problem.first_use_point]
        self.save_slot = [slots.of_point[p] for p in problem.save_points]
        cost = problem.launch_cost if problem.launch_cost is not None and problem.launch_cost.is_compute else None
        self.replay_op_s = 0.0 if cost is None else cost.replay_s
        """Seconds of the compute stream for each replayed op, in addition to the op itself."""
        self.out_s, self.fetch_s = (0.0, 0.0) if cost is None else (cost.out_s, cost.fetch_s)
        """The same for each copy out, and for each copy back."""
        self.record_s = 0.0 if cost is None else cost.record_s
        self.replay_time = [
            0.0 if replay is None else problem.replay_seconds(value) / self.time_unit_s
            for value, replay in enumerate(problem.replay.replays)
        ]
        self.all_bytes = sum(self.resident) or 1.0
        copies_s = sum(problem.out_seconds(v) + problem.in_seconds(v) for v in self.request.candidates)
        copies_s += (self.out_s + self.fetch_s) * len(self.request.candidates) + self.record_s * len(problem.op_ticks)
        self.longest = copies_s / self.time_unit_s + sum(self.replay_time) + 1.0
        """More time than any useful plan adds: an upper bound for the columns."""
        self.out_rate, self.in_rate = _rates(self)
        """Scaled bytes per scaled second: nominal for BOUND, latencies included for PLAN."""

    @property
    def is_bound(self) -> bool:
        return self.request.purpose is Purpose.BOUND

    @property
    def window(self) -> int:
        """Most points before its own use at which a value may be brought back."""
        is_large = not self.is_bound and len(self.request.candidates) > MANY
        return min(MANY_NEEDS, self.request.window) if is_large else self.request.window

    def op_time(self, op: int) -> float:
        """Seconds of one replayed op."""
        return (self.problem.replay.op_seconds[op] + self.replay_op_s) / self.time_unit_s

    def swap_time(self, value: int) -> float:
        """Seconds of the compute stream for a swap of a value, in addition to its copies."""
        back_s = self.fetch_s if self.use_slot[value] < self.slots.count else 0.0
        return (self.out_s + back_s) / self.time_unit_s

    def recording_time(self, value: int) -> float:
        """Seconds of recording for a value's replay, as if it shared no op and no window with others."""
        if not self.record_s or self.problem.replay.replays[value] is None:
            return 0.0
        return self.record_s * len(self.problem.replay.recorded_for([value])) / self.time_unit_s

    def replayed_by(self, value: int, slot: int) -> int | None:
        """Column "recomputed by the end of ``slot``'s points" before the value's own use; None if there is none."""
        found = None
        for early in self.early.get(value, ()):
            if early.slot > slot:
                break
            found = early.replayed
        return found


def _rates(model: FluidModel) -> tuple[float, float]:
    problem, candidates = model.problem, model.request.candidates
    if model.is_bound:
        scale = model.time_unit_s / model.unit
        return problem.link.out_bytes_per_s * scale, problem.link.in_bytes_per_s * scale
    total = sum(model.moved[value] for value in candidates) or 1.0
    out_s = sum(problem.out_seconds(value) for value in candidates) or 1.0
    in_s = sum(problem.in_seconds(value) for value in candidates) or 1.0
    return total / (out_s / model.time_unit_s), total / (in_s / model.time_unit_s)


class Stretch(NamedTuple):
    """A term of the sums from ``start`` to before ``stop``; without effect if ``stop`` is no later."""

    start: int
    stop: int
    column: int
    coefficient: float


WRITTEN_OUT = 1000
"""PLAN with fewer values has its sums written out: its relaxation then rounds better."""


def is_written_out(model: FluidModel) -> bool:
    """Whether each row contains all terms of its sum."""
    return not model.is_bound and len(model.request.candidates) < WRITTEN_OUT


def running_sums(model: FluidModel, count: int, spans: Iterable[Stretch]) -> list[list[Term]]:
    """For each of ``count`` places the sum of its terms, usually as one column; empty before the first term.

    A sum is between 0 and twice the bytes of all candidates.
    """
    entering: list[list[int]] = [[] for _ in range(count + 1)]
    leaving: list[list[int]] = [[] for _ in range(count + 1)]
    spans = [span for span in spans if span.start < span.stop]
    for index, span in enumerate(spans):
        entering[span.start].append(index)
        leaving[span.stop].append(index)
    if is_written_out(model):
        return _written_out(spans, entering, leaving)
    sums: list[list[Term]] = []
    before: int | None = None
    for enters, leaves in zip(entering[:count], leaving[:count], strict=True):
        if enters or leaves:
            now = model.linear.column(2 * model.all_bytes)
            terms: list[Term] = [(now, 1.0)] if before is None else [(now, 1.0), (before, -1.0)]
            terms += [(spans[index].column, -spans[index].coefficient) for index in enters]
            terms += [(spans[index].column, spans[index].coefficient) for index in leaves]
            model.linear.row(terms, low=0, high=0)
            before = now
        sums.append([] if before is None else [(before, 1.0)])
    return sums


def _written_out(spans: list[Stretch], entering: list[list[int]], leaving: list[list[int]]) -> list[list[Term]]:
    """The sums in the order of ``spans``."""
    active: set[int] = set()
    sums: list[list[Term]] = []
    for enters, leaves in zip(entering[:-1], leaving[:-1], strict=True):
        active.update(enters)
        active.difference_update(leaves)
        sums.append([(spans[index].column, spans[index].coefficient) for index in sorted(active)])
    return sums
