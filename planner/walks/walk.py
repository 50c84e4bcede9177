"""Annealing: a walk through the decisions that leaves local optima that no single change leaves.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983). Each step changes a few
decisions and evaluates them; a change for the worse is taken with probability ``exp(-loss / temperature)``. The random
numbers come from outside, so that the same numbers give the same walk, compiled or not: where the library is there,
``walk.h`` takes these very steps.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np

from poochplan.planner.evaluator.codes import KEEP, RECOMPUTE, SWAP
from poochplan.planner.evaluator.evaluate import Evaluator
from poochplan.planner.evaluator.evaluator_library import address, addresses
from poochplan.planner.problem.arrays import Bytes, Flags, Floats, Ints

OVER_BUDGET = 0.02
"""Share of the step that being over budget costs a walk, plus ``OVER_BUDGET_SLOPE`` times the share over."""
OVER_BUDGET_SLOPE = 5.0
STYLES = 3
"""The styles of :data:`~poochplan.planner.judge.candidate.STYLES`, by their codes."""
DRAWS = 48
"""More random numbers than one step takes."""
LONGEST_RUN = 24
"""Values of one role that are changed together, at most, or a stretch of them."""
LONGEST_STRETCH = 0.25
"""Share of a role that is changed together, and of all values that are taken over from another plan, at most."""
LONGEST_WINDOW = 6
"""Values saved one after another that are changed together, at most."""


class Limits(NamedTuple):
    """What a plan must stay within."""

    budget_bytes: int
    host_bytes: int
    """Most bytes swapped out; -1 where there is no limit."""


class Ground(NamedTuple):
    """Where a walk may go: the values it may change, and which of them belong together."""

    values: Ints
    """Ascending."""
    weights: Floats
    """Per one of ``values``: the sum of weights up to it; large values are drawn more often."""
    by_size: Ints
    """The same values, the smallest first."""
    place: Ints
    """Per saved value: where it stands in ``by_size``; -1 for one that does not change."""
    replayable: Flags
    """Per saved value."""
    role: Ints
    """Per saved value: which values have the same role in repeated layers."""
    role_first: Ints
    """Per role: where its values begin in ``role_values``; one entry more than roles."""
    role_values: Ints


class Trail(NamedTuple):
    """State: where a walk is, and the best decisions it met."""

    here: Bytes
    best: Bytes
    trial: Bytes
    mate: Bytes
    """Another good plan, to take decisions from."""
    scores: Floats
    """Of ``here`` and of ``best``."""
    styles: Ints
    """Of ``here`` and of ``best``."""


def score(evaluator: Evaluator, limits: Limits, style: int, decisions: Bytes) -> float:
    """The step as a share of the one that keeps all; more where the peak, or the host, is over its budget."""
    problem, budget_bytes = evaluator.problem, limits.budget_bytes
    found = evaluator.evaluate_codes(decisions, budget_bytes, style)
    share = found.step_s / problem.step_s if problem.step_s > 0.0 else 1.0
    if found.peak_bytes > budget_bytes:
        share += OVER_BUDGET + OVER_BUDGET_SLOPE * (found.peak_bytes - budget_bytes) / max(1, budget_bytes)
    if limits.host_bytes >= 0:
        over_bytes = int(problem.size_bytes[evaluator.codes == SWAP].sum()) - limits.host_bytes
        if over_bytes > 0:
            share += OVER_BUDGET + OVER_BUDGET_SLOPE * over_bytes / max(1, limits.host_bytes)
    return share


def walk_on(
    evaluator: Evaluator, ground: Ground, trail: Trail, limits: Limits, steps: int, temperature: float, draws: Floats
) -> int:
    """Takes so many steps; returns how many evaluations they took. ``draws``: :data:`DRAWS` numbers for each."""
    native = evaluator.native()
    if native is not None:
        given = addresses(ground), addresses(trail), np.array(limits)
        return int(native.walk_on(evaluator.handle, *map(address, given), steps, temperature, address(draws)))
    spent = 0
    for step in range(steps):
        first = step * DRAWS
        trail.trial[:] = trail.here
        style = _change(ground, trail.trial, trail.mate, int(trail.styles[0]), draws, first)
        if style == trail.styles[0] and (trail.trial == trail.here).all():
            continue
        found = score(evaluator, limits, style, trail.trial)
        spent += 1
        loss = found - trail.scores[0]
        if loss <= 0.0 or draws[first + DRAWS - 1] < exp(-loss / temperature):
            trail.here[:] = trail.trial
            trail.scores[0] = found
            trail.styles[0] = style
            if found < trail.scores[1]:
                trail.best[:] = trail.trial
                trail.scores[1] = found
                trail.styles[1] = style
    return spent


def _change(ground: Ground, trial: Bytes, mate: Bytes, style: int, draws: Floats, first: int) -> int:
    """Changes ``trial`` in one of the ways there are; returns the style to try it in. ``first``: of the draws."""
    kind = draws[first]
    if kind < 0.25:
        _exchange(ground, trial, draws, first + 1)
    elif kind < 0.60:
        _change_few(ground, trial, draws, first + 1)
    elif kind < 0.75:
        _change_role(ground, trial, draws, first + 1)
    elif kind < 0.83:
        _change_window(ground, trial, draws, first + 1)
    elif kind < 0.95:
        _copy_layer(ground, trial, draws, first + 1)
    elif kind < 0.98:
        _take_over(ground, trial, mate, draws, first + 1)
    else:
        return int(draws[first + 1] * STYLES)
    return style


def _exchange(ground: Ground, trial: Bytes, draws: Floats, first: int) -> None:
    """Two values of like size trade their decisions, where both may."""
    count = len(ground.values)
    one = _drawn(ground, draws[first])
    away = 1 + int(draws[first + 1] * 3)
    if draws[first + 2] < 0.5:
        away = -away
    other = ground.by_size[(ground.place[one] + away) % count]
    if (trial[one] != RECOMPUTE or ground.replayable[other]) and (trial[other] != RECOMPUTE or ground.replayable[one]):
        before = trial[one]
        trial[one] = trial[other]
        trial[other] = before


def _change_few(ground: Ground, trial: Bytes, draws: Floats, first: int) -> None:
    """One to three values, drawn one by one."""
    count = 1
    if draws[first] > 0.57:
        count = 2
    if draws[first] > 0.86:
        count = 3
    for which in range(count):
        value = _drawn(ground, draws[first + 1 + 2 * which])
        trial[value] = _decision(ground, value, draws[first + 2 + 2 * which])


def _change_role(ground: Ground, trial: Bytes, draws: Floats, first: int) -> None:
    """The same decision for a run of values of one role."""
    role = ground.role[_drawn(ground, draws[first])]
    low, high = ground.role_first[role], ground.role_first[role + 1]
    count = 1 + int(draws[first + 1] * min(high - low, max(LONGEST_RUN, int(LONGEST_STRETCH * (high - low)))))
    begin = low + int(draws[first + 2] * (high - low))
    decision = int(draws[first + 3] * 3)
    for at in range(begin, min(high, begin + count)):
        value = ground.role_values[at]
        if decision != RECOMPUTE or ground.replayable[value]:
            trial[value] = decision


def _copy_layer(ground: Ground, trial: Bytes, draws: Floats, first: int) -> None:
    """One layer, seldom several in a row, decide as another one does: all values of roles that each has as many of."""
    role = ground.role[_drawn(ground, draws[first])]
    layers = ground.role_first[role + 1] - ground.role_first[role]
    if layers < 2:
        return
    source = int(draws[first + 1] * layers)
    target = source + 1
    seldom = draws[first + 4] * draws[first + 4]
    count = 1 + int(seldom * seldom * layers / 4)
    if draws[first + 2] < 0.4:
        target = source - count
    elif draws[first + 2] > 0.8:
        target = int(draws[first + 3] * layers)
    begin, end = max(0, target), min(layers, target + count)
    for other in range(len(ground.role_first) - 1):
        low, high = ground.role_first[other], ground.role_first[other + 1]
        each = (high - low) // layers
        if each * layers == high - low:
            for at in range(begin * each, end * each):
                decision = trial[ground.role_values[low + source * each + at % each]]
                value = ground.role_values[low + at]
                if decision != RECOMPUTE or ground.replayable[value]:
                    trial[value] = decision


def _change_window(ground: Ground, trial: Bytes, draws: Floats, first: int) -> None:
    """Some of a few values that are saved one after another."""
    count = len(ground.values)
    begin = int(draws[first] * count)
    length = 2 + int(draws[first + 1] * (LONGEST_WINDOW - 1))
    for at in range(begin, min(count, begin + length)):
        which = first + 2 + 2 * (at - begin)
        if draws[which] < 0.6:
            value = ground.values[at]
            trial[value] = _decision(ground, value, draws[which + 1])


def _take_over(ground: Ground, trial: Bytes, mate: Bytes, draws: Floats, first: int) -> None:
    """A stretch of values, saved one after another, as another good plan has them."""
    count = len(ground.values)
    begin = int(draws[first] * count)
    length = 1 + int(draws[first + 1] * LONGEST_STRETCH * count)
    for at in range(begin, min(count, begin + length)):
        value = ground.values[at]
        trial[value] = mate[value]


def _drawn(ground: Ground, draw: float) -> int:
    """One of the values, by its weight."""
    low, high = 0, len(ground.values) - 1
    wanted = draw * ground.weights[high]
    while low < high:
        middle = (low + high) // 2
        if ground.weights[middle] > wanted:
            high = middle
        else:
            low = middle + 1
    value: int = ground.values[low]
    return value


def _decision(ground: Ground, value: int, draw: float) -> int:
    """Any decision that is possible for the value."""
    if ground.replayable[value]:
        return int(draw * 3)
    return KEEP if draw < 0.5 else SWAP
