"""Local search, compiled: each value with each other decision, as long as the simulated step gets shorter."""

from __future__ import annotations

from poochplan.planner.evaluator.codes import RECOMPUTE
from poochplan.planner.evaluator.compiled import compiled
from poochplan.planner.evaluator.layout import Layout
from poochplan.planner.evaluator.scratch import Scratch
from poochplan.planner.problem.arrays import Flags, Ints

from .walk import Limits, Trail, score

MIN_GAIN = 1e-6
"""Smallest gain that counts, as a share of the step."""
FAR_OFF = 0.01
"""A change whose step is this share longer than the best one is not tried in another style."""
SEARCH_STYLES = 2


@compiled
def sweep(layout: Layout, scratch: Scratch, replayable: Flags, trail: Trail, limits: Limits, values: Ints) -> int:
    """Tries each of ``values``, and takes what gains at once; returns how many evaluations that took."""
    spent = 0
    for value in values:
        for decision in range(3):
            if decision == trail.here[value] or (decision == RECOMPUTE and not replayable[value]):
                continue
            before = trail.here[value]
            trail.here[value] = decision
            is_better = False
            for style in range(SEARCH_STYLES):
                found = score(layout, scratch, limits, style, trail.here)
                spent += 1
                if found < trail.scores[0] - MIN_GAIN:
                    trail.scores[:] = found
                    trail.styles[:] = style
                    is_better = True
                if found > trail.scores[0] + FAR_OFF:
                    break
            if is_better:
                trail.best[value] = decision
            else:
                trail.here[value] = before
    return spent
