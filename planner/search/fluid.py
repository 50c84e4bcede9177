"""The fluid models' data: the request for a model, and its columns by their meaning.

In these models decisions are chosen, and copies move any share of a value. PLAN decides and may restrict. BOUND only
relaxes, so no plan is faster than its optimum. The two differ in a few rows, which the files of constraints add.
docs/planner.md lists the rows and gives the argument for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Floats, Ints
from poochplan.planner.search.solvers import LinearModel, Term
from poochplan.planner.simulator.problem import Problem


class Slots:
    """Stretches of compute between clock points that do not coincide in time."""

    def __init__(self, problem: Problem) -> None:
        first: list[int] = []  # first point of each slot
        self.of_point: list[int] = []
        for index, work_s in enumerate(problem.point_work_s):
            if not first or work_s > problem.point_work_s[first[-1]]:
                first.append(index)
            self.of_point.append(len(first) - 1)
        self.count = len(first)
        self.seconds: Floats = np.diff(np.append(problem.point_work_s[first], problem.step_s))
        self.start_tick: Ints = problem.point_ticks[first]
        self.last_point_tick: Ints = problem.point_ticks[[*(point - 1 for point in first[1:]), len(self.of_point) - 1]]
        """Tick of the last point of each slot: the actions of the slot's points are done after it."""
        self.first_backward = min((self.of_point[point] for point in problem.use_points), default=self.count)
        """First slot that has a use point."""
        self._starts: list[int] = self.start_tick.tolist()

    def at_tick(self, tick: int) -> int:
        """The slot that holds a tick; 0 for a tick before the first point."""
        return max(0, bisect_right(self._starts, tick) - 1)


WINDOW_NEEDS = 30
"""A value may be brought back at this many of the last points with replays before its own use."""

MANY, MANY_NEEDS = 1000, 4
"""With more values than the first number, PLAN has only the second number of points. Its relaxation has the same
results, in a tenth of the time."""


@dataclass(frozen=True)
class Early:
    """A point before a value's own use by which the value may be back, because a replay needs it."""

    slot: int
    replayed: int | None
    """Column ``R``, "recomputed by then"; None if the value cannot be recomputed."""
    fetched: int | None
    """Column ``G``, "swapped in by then"; None if no replay would start from it there."""


@dataclass(frozen=True)
class Request:
    budget_bytes: int
    candidates: tuple[int, ...]
    """Values that may be swapped or recomputed."""
    is_bound: bool = False
    """Whether the model is BOUND, not PLAN."""
    host_bytes: int | None = None
    window: int = WINDOW_NEEDS
    whole: tuple[int, ...] = ()
    """Values, all of them candidates, that PLAN moves in one piece; see ``memory_constraints.py``."""
    free: tuple[int, ...] = ()
    """Values, none of them candidates, that leave and return at no cost in BOUND."""


class FluidModel:
    """The model under construction: columns by their meaning. ``unit`` bytes and ``time_unit_s`` are 1 in it.

    Letters are those of the table in the planner's page (The models). Other modules fill the columns: ``decide.py``
    those of decisions, early returns and the link, ``time_constraints.py`` those of time.
    """

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem, self.request, self.is_bound = problem, request, request.is_bound
        self.slots, self.linear = Slots(problem), LinearModel()
        candidates = list(request.candidates)
        self.unit = max(1.0, float(np.mean(problem.rounded_bytes[candidates])) / 10) if candidates else 1.0
        self.time_unit_s = problem.step_s / 1000 or 1.0
        self.swap, self.recompute = dict[int, int](), dict[int, int]()
        self.early: dict[int, list[Early]] = {}
        """Ascending by slot, all before the value's own use."""
        self.consumers: dict[int, list[int]] = {}
        """Per value: the recomputable values whose replay starts from it."""
        self.replayed_ahead: dict[int, list[tuple[int, float]]] = {}
        """``A``: per backward slot, in BOUND, columns of the seconds already spent on replays whose values are not back
        yet, and the bytes per second of each.
        """
        self.extra, self.not_out = list[int](), list[int]()
        """``x`` and ``n``, per slot: time the step takes beyond its compute (stalls and replays); bytes to be swapped
        that have not left.
        """
        self.ahead, self.arriving = dict[int, int](), dict[int, int]()
        """``a`` and ``v``, per backward slot: bytes that are back before they are needed, after its points; bytes that
        arrive during its compute.
        """
        self.released, self.issued = dict[int, list[tuple[int, int]]](), dict[int, list[tuple[int, int]]]()
        """Per value that moves in one piece, at slots of a grid: columns "its copy is out and its buffer released by
        the end of the slot's points", and "its copy back has been issued by then".
        """
        self.rest_out, self.rest_ahead = dict[int, int](), dict[int, int]()
        """Per slot, and per backward slot: bytes of the other values that are out, and that are back before their
        need."""
        self._measure(candidates)

    def _measure(self, candidates: list[int]) -> None:
        """Sizes, seconds and rates in the model's units."""
        problem, slots = self.problem, self.slots
        moved_bytes = problem.size_bytes if self.is_bound else problem.rounded_bytes
        self.resident = [float(size) / self.unit for size in problem.rounded_bytes]
        """Per value: scaled bytes it takes on the device."""
        self.returned = list(self.resident)
        """Per value: scaled bytes that it adds once a replay has brought it back. For a copy these are without its
        source, whose bytes count up to the copy's use, and which is gone once the copy is back."""
        for source, copy in problem.copies.items():
            self.returned[copy] -= self.resident[source]
        self.moved = [float(size) / self.unit for size in moved_bytes]
        """Per value: scaled bytes of a copy of it."""
        own = {**{value: value for value in range(problem.value_count)}, **problem.copies}
        used_at = [problem.first_use_point[own[value]] for value in range(problem.value_count)]
        self.use_slot = [slots.of_point[p] if p >= 0 else slots.count for p in used_at]
        """Per value: the slot of its first use; for a source, that of its larger copy."""
        self.first_use: Ints = problem.first_use[list(own.values())]
        """The same in ticks."""
        self.save_slot = [slots.of_point[p] for p in problem.save_points]
        cost = problem.launch_cost
        costs_s = cost.replay_s, cost.out_s, cost.fetch_s, cost.record_s
        self.replay_op_s, self.out_s, self.fetch_s, self.record_s = costs_s if cost.is_compute else (0.0,) * 4
        """Seconds of the compute stream for each replayed op in addition to the op itself, each copy out, each copy
        back, and each recorded op."""
        self.replay_time = [
            0.0 if replay is None else problem.replay_seconds(value) / self.time_unit_s
            for value, replay in enumerate(problem.replay.replays)
        ]
        self.all_bytes = sum(self.resident) or 1.0
        copies_s = sum(problem.out_seconds(v) + problem.in_seconds(v) for v in candidates)
        copies_s += (self.out_s + self.fetch_s) * len(candidates) + self.record_s * len(problem.op_ticks)
        self.longest = copies_s / self.time_unit_s + sum(self.replay_time) + 1.0
        """More time than any useful plan adds: an upper bound for the columns."""
        scale, total = self.time_unit_s / self.unit, sum(self.moved[value] for value in candidates) or 1.0
        out_s = sum(problem.out_seconds(value) for value in candidates) or 1.0
        in_s = sum(problem.in_seconds(value) for value in candidates) or 1.0
        self.out_rate, self.in_rate = total / (out_s / self.time_unit_s), total / (in_s / self.time_unit_s)
        """Scaled bytes per scaled second: nominal for BOUND, latencies included for PLAN."""
        if self.is_bound:
            self.out_rate, self.in_rate = problem.link.out_bytes_per_s * scale, problem.link.in_bytes_per_s * scale

    @property
    def window(self) -> int:
        """Most points before its own use at which a value may be brought back."""
        is_large = not self.is_bound and len(self.request.candidates) > MANY
        return min(MANY_NEEDS, self.request.window) if is_large else self.request.window

    def shares(self, solution: Floats) -> Floats:
        """(3, values): the shares kept, swapped and recomputed in a solution."""
        swap, recompute = np.zeros((2, self.problem.value_count))
        swap[list(self.swap)] = solution[list(self.swap.values())]
        recompute[list(self.recompute)] = solution[list(self.recompute.values())]
        return np.stack([1.0 - swap - recompute, swap, recompute])

    def swap_time(self, value: int) -> float:
        """Seconds of the compute stream for a swap of a value, in addition to its copies."""
        back_s = self.fetch_s if self.use_slot[value] < self.slots.count else 0.0
        return (self.out_s + back_s) / self.time_unit_s

    def replayed_by(self, value: int, slot: int) -> int | None:
        """Column "recomputed by the end of ``slot``'s points" before the value's own use; None if there is none."""
        return next((one.replayed for one in reversed(self.early.get(value, ())) if one.slot <= slot), None)


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
    sums: list[list[Term]] = []
    active: set[int] = set()
    before: int | None = None
    for enters, leaves in zip(entering[:count], leaving[:count], strict=True):
        if is_written_out(model):  # in the order of ``spans``
            active = (active | set(enters)) - set(leaves)
            sums.append([(spans[index].column, spans[index].coefficient) for index in sorted(active)])
            continue
        if enters or leaves:
            now = model.linear.column(2 * model.all_bytes)
            terms: list[Term] = [(now, 1.0)] if before is None else [(now, 1.0), (before, -1.0)]
            terms += [(spans[index].column, -spans[index].coefficient) for index in enters]
            terms += [(spans[index].column, spans[index].coefficient) for index in leaves]
            model.linear.row(terms, low=0, high=0)
            before = now
        sums.append([] if before is None else [(before, 1.0)])
    return sums
