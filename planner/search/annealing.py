"""Annealing and descent: one thread's walks through decisions.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983). Each step changes a few
decisions and evaluates them; a change for the worse is taken with probability ``exp(-loss / temperature)``. The random
numbers come from outside, so that the same numbers give the same walk.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Bytes
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.incumbents import EvaluatedPlan, Incumbents
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP, Evaluator, FlatProblem
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import STYLES

OVER_BUDGET = 0.02
"""Cost, as a share of the step, of being over budget in a walk; ``OVER_BUDGET_SLOPE`` times the excess share is
added.
"""
OVER_BUDGET_SLOPE = 5.0
DRAWS = 48
"""More random numbers than one step uses."""
LONGEST_RUN = 24
"""Most values of one role, or of a stretch of them, that are changed together."""
LONGEST_STRETCH = 0.25
"""Largest share of a role that is changed together, and largest share of all values that is taken over from another
plan."""
LONGEST_WINDOW = 6
"""Most values saved one after another that are changed together."""


class Limits(NamedTuple):
    """Limits that a plan must respect."""

    budget_bytes: int
    host_bytes: int
    """Most bytes swapped out; -1 if there is no limit."""


class SearchSpace(NamedTuple):
    """The space of a walk: the values that it may change, and which of them belong together."""

    values: Sequence[int]
    """In ascending order."""
    weights: Sequence[float]
    """Per one of ``values``: the sum of weights up to it; large values are drawn more often."""
    by_size: Sequence[int]
    """The same values, the smallest first."""
    place: Mapping[int, int]
    """Position of each value in ``by_size``."""
    replayable: Sequence[bool]
    """Per saved value."""
    roles: Sequence[Sequence[int]]
    """The values that have the same role in repeated layers."""
    role: Mapping[int, Sequence[int]]
    """For each value, the values of its role."""


class Scored(NamedTuple):
    """Decisions in one style, and their cost in a walk."""

    score: float
    style: int
    codes: bytes


def scored(evaluator: Evaluator, limits: Limits, style: int, codes: bytes) -> Scored:
    """The step as a share of the one that keeps all; the cost is higher if the peak, or the host, exceeds its
    budget.
    """
    problem, budget_bytes = evaluator.problem, limits.budget_bytes
    found = evaluator.evaluate_codes(codes, budget_bytes, style)
    share = found.step_s / problem.step_s if problem.step_s > 0.0 else 1.0
    if found.peak_bytes > budget_bytes:
        share += OVER_BUDGET + OVER_BUDGET_SLOPE * (found.peak_bytes - budget_bytes) / max(1, budget_bytes)
    if limits.host_bytes >= 0:
        over_bytes = int(problem.size_bytes[evaluator.codes == SWAP].sum()) - limits.host_bytes
        if over_bytes > 0:
            share += OVER_BUDGET + OVER_BUDGET_SLOPE * over_bytes / max(1, limits.host_bytes)
    return Scored(share, style, codes)


def step(
    evaluator: Evaluator,
    space: SearchSpace,
    limits: Limits,
    here: Scored,
    mate: bytes,
    temperature: float,
    draws: Sequence[float],
) -> Scored:
    """The position of a walk after one step. ``mate``: another good plan, to take decisions from; ``draws``:
    :data:`DRAWS` random numbers.
    """
    trial = bytearray(here.codes)
    style = _change(space, trial, mate, here.style, draws)
    if style == here.style and trial == here.codes:
        return here
    there = scored(evaluator, limits, style, bytes(trial))
    loss = there.score - here.score
    return there if loss <= 0.0 or draws[-1] < exp(-loss / temperature) else here


def _change(space: SearchSpace, trial: bytearray, mate: bytes, style: int, draws: Sequence[float]) -> int:
    """Changes ``trial`` in one of the possible ways; returns the style in which to try it."""
    kind = draws[0]
    if kind < 0.25:
        _exchange(space, trial, draws)
    elif kind < 0.60:
        _change_few(space, trial, draws)
    elif kind < 0.75:
        _change_role(space, trial, draws)
    elif kind < 0.83:
        _change_window(space, trial, draws)
    elif kind < 0.95:
        _copy_layer(space, trial, draws)
    elif kind < 0.98:
        _take_over(space, trial, mate, draws)
    else:
        return int(draws[1] * len(STYLES))
    return style


def _exchange(space: SearchSpace, trial: bytearray, draws: Sequence[float]) -> None:
    """Two values of similar size trade their decisions, if both may have them."""
    one = _drawn(space, draws[1])
    away = 1 + int(draws[2] * 3)
    if draws[3] < 0.5:
        away = -away
    other = space.by_size[(space.place[one] + away) % len(space.values)]
    if (trial[one] != RECOMPUTE or space.replayable[other]) and (trial[other] != RECOMPUTE or space.replayable[one]):
        trial[one], trial[other] = trial[other], trial[one]


def _change_few(space: SearchSpace, trial: bytearray, draws: Sequence[float]) -> None:
    """One to three values, drawn one by one."""
    count = 3 if draws[1] > 0.86 else 2 if draws[1] > 0.57 else 1
    for which in range(count):
        value = _drawn(space, draws[2 + 2 * which])
        trial[value] = _decision(space, value, draws[3 + 2 * which])


def _change_role(space: SearchSpace, trial: bytearray, draws: Sequence[float]) -> None:
    """The same decision for a run of values of one role."""
    role = space.role[_drawn(space, draws[1])]
    longest = min(len(role), max(LONGEST_RUN, int(LONGEST_STRETCH * len(role))))
    begin, count = int(draws[3] * len(role)), 1 + int(draws[2] * longest)
    decision = int(draws[4] * 3)
    for value in role[begin : begin + count]:
        if decision != RECOMPUTE or space.replayable[value]:
            trial[value] = decision


def _copy_layer(space: SearchSpace, trial: bytearray, draws: Sequence[float]) -> None:
    """One layer, rarely several in a row, gets the decisions of another one, for all roles of which both have the same
    number of values.
    """
    layers = len(space.role[_drawn(space, draws[1])])
    if layers < 2:
        return
    source = int(draws[2] * layers)
    target = source + 1
    seldom = draws[5] * draws[5]
    count = 1 + int(seldom * seldom * layers / 4)
    if draws[3] < 0.4:
        target = source - count
    elif draws[3] > 0.8:
        target = int(draws[4] * layers)
    begin, end = max(0, target), min(layers, target + count)
    for role in space.roles:
        each, rest = divmod(len(role), layers)
        if rest:
            continue
        for at in range(begin * each, end * each):
            decision, value = trial[role[source * each + at % each]], role[at]
            if decision != RECOMPUTE or space.replayable[value]:
                trial[value] = decision


def _change_window(space: SearchSpace, trial: bytearray, draws: Sequence[float]) -> None:
    """Changes some of a few values that are saved one after another."""
    begin, length = int(draws[1] * len(space.values)), 2 + int(draws[2] * (LONGEST_WINDOW - 1))
    for at, value in enumerate(space.values[begin : begin + length]):
        if draws[3 + 2 * at] < 0.6:
            trial[value] = _decision(space, value, draws[4 + 2 * at])


def _take_over(space: SearchSpace, trial: bytearray, mate: bytes, draws: Sequence[float]) -> None:
    """Takes over the decisions of another good plan for a stretch of values, saved one after another."""
    count = len(space.values)
    begin, length = int(draws[1] * count), 1 + int(draws[2] * LONGEST_STRETCH * count)
    for value in space.values[begin : begin + length]:
        trial[value] = mate[value]


def _drawn(space: SearchSpace, draw: float) -> int:
    """One of the values, by its weight."""
    last = len(space.values) - 1
    return space.values[bisect_right(space.weights, draw * space.weights[last], 0, last)]


def _decision(space: SearchSpace, value: int, draw: float) -> int:
    """A random decision that is possible for the value."""
    if space.replayable[value]:
        return int(draw * 3)
    return KEEP if draw < 0.5 else SWAP


MIN_GAIN = 1e-6
"""Smallest gain that counts, as a share of the step."""
FAR_OFF = 0.01
"""A change whose step is longer than the best one by this share is not tried in another style."""
SEARCH_STYLES = 2


def sweep(
    evaluator: Evaluator, replayable: Sequence[bool], limits: Limits, here: Scored, values: Iterable[int]
) -> tuple[Scored, int]:
    """Tries each of ``values`` with each other decision, and takes at once what gains. Returns the result and the
    number of evaluations.
    """
    spent = 0
    for value in values:
        for decision in (KEEP, SWAP, RECOMPUTE):
            if decision == here.codes[value] or (decision == RECOMPUTE and not replayable[value]):
                continue
            trial = bytearray(here.codes)
            trial[value] = decision
            for style in range(SEARCH_STYLES):
                there = scored(evaluator, limits, style, bytes(trial))
                spent += 1
                if there.score < here.score - MIN_GAIN:
                    here = there
                if there.score > here.score + FAR_OFF:
                    break
    return here, spent


COLDEST = 1e-5
"""Last temperature, as a share of the step."""
SWEPT_AT_ONCE = 8
"""Number of values that a descent tries before it checks its allowance."""


class Walker:
    """State: everything that one thread needs to evaluate decisions. It offers the plans that it finds to the
    incumbents.
    """

    def __init__(
        self,
        problem: Problem,
        flat: FlatProblem,
        values: Sequence[int],
        incumbents: Incumbents,
        is_enough: Callable[[float], bool] = lambda step_s: False,
    ) -> None:
        """``is_enough`` says whether a step of that many seconds ends the search."""
        self.problem, self.values, self.incumbents, self._is_enough = problem, tuple(values), incumbents, is_enough
        self._evaluator = Evaluator(problem, flat)
        self._replayable = [replay is not None for replay in problem.replay.replays]

    @property
    def _limits(self) -> Limits:
        return Limits(self.incumbents.within_bytes, self.incumbents.host_bytes)

    @property
    def _is_over(self) -> bool:
        return self._is_enough(self.incumbents.step_s)

    def try_styles(self, wish: Bytes, origin: str, styles: Sequence[int] = range(len(STYLES))) -> EvaluatedPlan:
        """Tries decisions in each of the styles; returns the best one."""
        tried = [self.incumbents.offer(self._evaluated(wish, style, origin)) for style in styles]
        return min(tried, key=self.incumbents.rank)

    def anneal(
        self,
        start: EvaluatedPlan,
        allowance: Allowance,
        *,
        temperature: float,
        seed: int,
        pinned: Sequence[int] = (),
        mate: EvaluatedPlan | None = None,
    ) -> EvaluatedPlan:
        """The best plan met on a walk that also takes changes for the worse, less and less often.

        ``temperature`` is the loss, as a share of the step, that is taken with probability 1/e at the start; it falls
        to :data:`COLDEST`. The values of ``pinned`` do not change. ``mate`` is another plan, to take decisions from.
        """
        values = [value for value in self.values if value not in set(pinned)]
        if not values:
            return start
        space, rng, limits = search_space_of(self.problem, values), np.random.default_rng(seed), self._limits
        here = best = scored(self._evaluator, limits, start.style, start.wish.tobytes())
        mate_codes = (mate or start).wish.tobytes()
        while not allowance.is_spent and not self._is_over:
            if limits != self._limits:
                limits = self._limits
                here, best = (scored(self._evaluator, limits, each.style, each.codes) for each in (here, best))
            before, steps = best, allowance.at_once()
            warmth = temperature * (COLDEST / temperature) ** allowance.progress
            for draws in rng.random((steps, DRAWS)).tolist():
                here = step(self._evaluator, space, limits, here, mate_codes, warmth, draws)
                best = here if here.score < best.score else best
            allowance.spend(steps)
            if best is not before:
                self._offer(best, start.origin, is_end=False)
        return self._offer(best, start.origin)

    def descend(self, start: EvaluatedPlan, allowance: Allowance) -> EvaluatedPlan:
        """Tries each value with each other decision, the costliest first, until a whole round gains nothing."""
        order = sorted(self.values, key=lambda v: (-self._cost(start.wish, v), v))
        limits = self._limits
        here = scored(self._evaluator, limits, start.style, start.wish.tobytes())
        last_gain = at = 0
        while at - last_gain < len(order) and not allowance.is_spent and not self._is_over:
            some = [order[(at + step) % len(order)] for step in range(SWEPT_AT_ONCE)]
            before = here
            here, spent = sweep(self._evaluator, self._replayable, limits, here, some)
            allowance.spend(spent)
            at += len(some)
            if here is not before:
                last_gain = at
        return self._offer(here, start.origin)

    def _offer(self, best: Scored, origin: str, *, is_end: bool = True) -> EvaluatedPlan:
        """During the walk, offers only plans that need no packing, or that end the search."""
        found = self._evaluated(np.frombuffer(best.codes, dtype=np.int8), best.style, origin)
        if is_end or self.incumbents.fitting is None or self._is_enough(found.step_s):
            return self.incumbents.offer(found)
        return found

    def _evaluated(self, wish: Bytes, style: int, origin: str) -> EvaluatedPlan:
        within_bytes = self.incumbents.within_bytes
        found = self._evaluator.evaluate_codes(wish.tobytes(), within_bytes, style)
        decisions = self._evaluator.codes.copy()
        return EvaluatedPlan(
            wish, decisions, style, found.step_s, found.peak_bytes, found.moved_bytes, origin, within_bytes
        )

    def _cost(self, wish: Bytes, value: int) -> float:
        if wish[value] == RECOMPUTE:
            return self.problem.replay_seconds(value)
        return self.problem.out_seconds(value) if wish[value] else 0.0


def search_space_of(problem: Problem, values: Sequence[int]) -> SearchSpace:
    """The space of a walk over ``values``."""
    size_bytes = problem.rounded_bytes.tolist()
    by_size = sorted(values, key=lambda v: (size_bytes[v], v))
    roles = _roles(problem, values)
    return SearchSpace(
        values=values,
        weights=list(accumulate(float(size_bytes[value]) ** 0.5 for value in values)),
        by_size=by_size,
        place={value: place for place, value in enumerate(by_size)},
        replayable=[replay is not None for replay in problem.replay.replays],
        roles=roles,
        role={value: role for role in roles for value in role},
    )


def _roles(problem: Problem, values: Sequence[int]) -> list[list[int]]:
    """Values of the same size, the same name except for its numbers, and replays of the same length have the same role
    in repeated layers.
    """
    groups: dict[tuple[int, str, int], list[int]] = {}
    for value in values:
        replay = problem.replay.replays[value]
        name = re.sub(r"\d+", "", problem.names[value])
        key = int(problem.rounded_bytes[value]), name, -1 if replay is None else len(replay.ops)
        groups.setdefault(key, []).append(value)
    return list(groups.values())
