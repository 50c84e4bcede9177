"""Slots: the stretches of compute between clock points, to which the fluid model aggregates events."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from poochplan.planner.problem.arrays import Floats, Ints
from poochplan.planner.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class Slots:
    """Stretches of compute between clock points that do not coincide in time."""

    first_point: tuple[int, ...]
    """First point of each slot."""
    seconds: Floats
    of_point: tuple[int, ...]
    start_tick: Ints
    first_backward: int
    """First slot that begins with, or contains, a use point."""

    last_point_tick: Ints
    """Tick of the last point of each slot: what the slot's points do is done after it."""

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
    """Aggregates the clock points to slots."""
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
