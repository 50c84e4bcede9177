"""Local search, compiled or not: each value with each other decision, as long as the simulated step gets shorter."""

from __future__ import annotations

import numpy as np

from poochplan.planner.evaluator.codes import RECOMPUTE
from poochplan.planner.evaluator.evaluate import Evaluator
from poochplan.planner.evaluator.evaluator_library import address, addresses
from poochplan.planner.problem.arrays import Flags, Ints

from .walk import Limits, Trail, score

MIN_GAIN = 1e-6
"""Smallest gain that counts, as a share of the step."""
FAR_OFF = 0.01
"""A change whose step is this share longer than the best one is not tried in another style."""
SEARCH_STYLES = 2


def sweep(evaluator: Evaluator, replayable: Flags, trail: Trail, limits: Limits, values: Ints) -> int:
    """Tries each of ``values``, and takes what gains at once; returns how many evaluations that took."""
    native = evaluator.native()
    if native is not None:
        given = addresses([replayable]), addresses(trail), np.array(limits), addresses([values])
        return int(native.sweep(evaluator.handle, *map(address, given)))
    spent = 0
    for value in values:
        for decision in range(3):
            if decision == trail.here[value] or (decision == RECOMPUTE and not replayable[value]):
                continue
            before = trail.here[value]
            trail.here[value] = decision
            is_better = False
            for style in range(SEARCH_STYLES):
                found = score(evaluator, limits, style, trail.here)
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
