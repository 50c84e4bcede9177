"""What a schedule holds at one tick: the saved values that are there, and the replay that takes most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule

from .simulate import ReplayRun, Walk, inside_replays, lives


@dataclass(frozen=True)
class Held:
    """At the moment of a tick at which most is live."""

    saved: tuple[int, ...]
    """Saved values that are there, each as often as it is (a copy may be back before the first life has ended)."""
    replay: ReplayRun | None
    """Inside which that moment lies; its targets are in its ``peak_bytes``, and not in ``saved``."""


def held_at(problem: Problem, schedule: Schedule, tick: int) -> Held:
    """Saved values and replay that the simulator counts at ``tick`` beside ``problem.base_bytes``."""
    walk = Walk(problem, schedule)
    first_end, back, end = lives(problem, walk)
    first = np.flatnonzero((problem.born <= tick) & (tick <= first_end))
    again = np.flatnonzero((back >= 0) & (back <= tick) & (tick <= end))
    saved = [*first.tolist(), *again.tolist()]
    runs = [run for run in walk.replays if run.tick == tick]
    after_bytes = int(problem.base_bytes[tick]) + int(problem.rounded_bytes[saved].sum())
    inside = inside_replays(problem, runs, after_bytes)
    if not inside or max(inside) <= after_bytes:
        return Held(tuple(saved), None)
    at = inside.index(max(inside))
    for run in runs[at:]:
        for target in run.targets:
            saved.remove(target)
    return Held(tuple(saved), runs[at])
