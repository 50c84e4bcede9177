"""Annealing and descent: one thread's walks through decisions, compiled or not.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983). Each step changes a few
decisions and evaluates them; a change for the worse is taken with probability ``exp(-loss / temperature)``. The random
numbers come from outside, so that the same numbers give the same walk, compiled or not: where the library is there,
``walk.h`` takes these very steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Bytes, Flags, Floats, Ints
from poochplan.planner.allowance import Allowance
from poochplan.planner.problem.problem import Problem
from poochplan.planner.search.incumbents import EvaluatedPlan, Incumbents
from poochplan.planner.simulator.candidate import STYLES
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP, Evaluator, address, addresses
from poochplan.planner.simulator.flat_problem import FlatProblem

OVER_BUDGET = 0.02
"""Share of the step that being over budget costs a walk, plus ``OVER_BUDGET_SLOPE`` times the share over."""
OVER_BUDGET_SLOPE = 5.0
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


class SearchSpace(NamedTuple):
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


class ChainState(NamedTuple):
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
    evaluator: Evaluator,
    space: SearchSpace,
    state: ChainState,
    limits: Limits,
    steps: int,
    temperature: float,
    draws: Floats,
) -> int:
    """Takes so many steps; returns how many evaluations they took. ``draws``: :data:`DRAWS` numbers for each."""
    native = evaluator.native()
    if native is not None:
        given = addresses(space), addresses(state), np.array(limits)
        return int(native.walk_on(evaluator.handle, *map(address, given), steps, temperature, address(draws)))
    spent = 0
    for step in range(steps):
        first = step * DRAWS
        state.trial[:] = state.here
        style = _change(space, state.trial, state.mate, int(state.styles[0]), draws, first)
        if style == state.styles[0] and (state.trial == state.here).all():
            continue
        found = score(evaluator, limits, style, state.trial)
        spent += 1
        loss = found - state.scores[0]
        if loss <= 0.0 or draws[first + DRAWS - 1] < exp(-loss / temperature):
            state.here[:] = state.trial
            state.scores[0] = found
            state.styles[0] = style
            if found < state.scores[1]:
                state.best[:] = state.trial
                state.scores[1] = found
                state.styles[1] = style
    return spent


def _change(space: SearchSpace, trial: Bytes, mate: Bytes, style: int, draws: Floats, first: int) -> int:
    """Changes ``trial`` in one of the ways there are; returns the style to try it in. ``first``: of the draws."""
    kind = draws[first]
    if kind < 0.25:
        _exchange(space, trial, draws, first + 1)
    elif kind < 0.60:
        _change_few(space, trial, draws, first + 1)
    elif kind < 0.75:
        _change_role(space, trial, draws, first + 1)
    elif kind < 0.83:
        _change_window(space, trial, draws, first + 1)
    elif kind < 0.95:
        _copy_layer(space, trial, draws, first + 1)
    elif kind < 0.98:
        _take_over(space, trial, mate, draws, first + 1)
    else:
        return int(draws[first + 1] * len(STYLES))
    return style


def _exchange(space: SearchSpace, trial: Bytes, draws: Floats, first: int) -> None:
    """Two values of like size trade their decisions, where both may."""
    count = len(space.values)
    one = _drawn(space, draws[first])
    away = 1 + int(draws[first + 1] * 3)
    if draws[first + 2] < 0.5:
        away = -away
    other = space.by_size[(space.place[one] + away) % count]
    if (trial[one] != RECOMPUTE or space.replayable[other]) and (trial[other] != RECOMPUTE or space.replayable[one]):
        before = trial[one]
        trial[one] = trial[other]
        trial[other] = before


def _change_few(space: SearchSpace, trial: Bytes, draws: Floats, first: int) -> None:
    """One to three values, drawn one by one."""
    count = 1
    if draws[first] > 0.57:
        count = 2
    if draws[first] > 0.86:
        count = 3
    for which in range(count):
        value = _drawn(space, draws[first + 1 + 2 * which])
        trial[value] = _decision(space, value, draws[first + 2 + 2 * which])


def _change_role(space: SearchSpace, trial: Bytes, draws: Floats, first: int) -> None:
    """The same decision for a run of values of one role."""
    role = space.role[_drawn(space, draws[first])]
    low, high = space.role_first[role], space.role_first[role + 1]
    count = 1 + int(draws[first + 1] * min(high - low, max(LONGEST_RUN, int(LONGEST_STRETCH * (high - low)))))
    begin = low + int(draws[first + 2] * (high - low))
    decision = int(draws[first + 3] * 3)
    for at in range(begin, min(high, begin + count)):
        value = space.role_values[at]
        if decision != RECOMPUTE or space.replayable[value]:
            trial[value] = decision


def _copy_layer(space: SearchSpace, trial: Bytes, draws: Floats, first: int) -> None:
    """One layer, seldom several in a row, decide as another one does: all values of roles that each has as many of."""
    role = space.role[_drawn(space, draws[first])]
    layers = space.role_first[role + 1] - space.role_first[role]
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
    for other in range(len(space.role_first) - 1):
        low, high = space.role_first[other], space.role_first[other + 1]
        each = (high - low) // layers
        if each * layers == high - low:
            for at in range(begin * each, end * each):
                decision = trial[space.role_values[low + source * each + at % each]]
                value = space.role_values[low + at]
                if decision != RECOMPUTE or space.replayable[value]:
                    trial[value] = decision


def _change_window(space: SearchSpace, trial: Bytes, draws: Floats, first: int) -> None:
    """Some of a few values that are saved one after another."""
    count = len(space.values)
    begin = int(draws[first] * count)
    length = 2 + int(draws[first + 1] * (LONGEST_WINDOW - 1))
    for at in range(begin, min(count, begin + length)):
        which = first + 2 + 2 * (at - begin)
        if draws[which] < 0.6:
            value = space.values[at]
            trial[value] = _decision(space, value, draws[which + 1])


def _take_over(space: SearchSpace, trial: Bytes, mate: Bytes, draws: Floats, first: int) -> None:
    """A stretch of values, saved one after another, as another good plan has them."""
    count = len(space.values)
    begin = int(draws[first] * count)
    length = 1 + int(draws[first + 1] * LONGEST_STRETCH * count)
    for at in range(begin, min(count, begin + length)):
        value = space.values[at]
        trial[value] = mate[value]


def _drawn(space: SearchSpace, draw: float) -> int:
    """One of the values, by its weight."""
    low, high = 0, len(space.values) - 1
    wanted = draw * space.weights[high]
    while low < high:
        middle = (low + high) // 2
        if space.weights[middle] > wanted:
            high = middle
        else:
            low = middle + 1
    value: int = space.values[low]
    return value


def _decision(space: SearchSpace, value: int, draw: float) -> int:
    """Any decision that is possible for the value."""
    if space.replayable[value]:
        return int(draw * 3)
    return KEEP if draw < 0.5 else SWAP


MIN_GAIN = 1e-6
"""Smallest gain that counts, as a share of the step."""
FAR_OFF = 0.01
"""A change whose step is this share longer than the best one is not tried in another style."""
SEARCH_STYLES = 2


def sweep(evaluator: Evaluator, replayable: Flags, state: ChainState, limits: Limits, values: Ints) -> int:
    """Tries each of ``values``, and takes what gains at once; returns how many evaluations that took."""
    native = evaluator.native()
    if native is not None:
        given = addresses([replayable]), addresses(state), np.array(limits), addresses([values])
        return int(native.sweep(evaluator.handle, *map(address, given)))
    spent = 0
    for value in values:
        for decision in range(3):
            if decision == state.here[value] or (decision == RECOMPUTE and not replayable[value]):
                continue
            before = state.here[value]
            state.here[value] = decision
            is_better = False
            for style in range(SEARCH_STYLES):
                found = score(evaluator, limits, style, state.here)
                spent += 1
                if found < state.scores[0] - MIN_GAIN:
                    state.scores[:] = found
                    state.styles[:] = style
                    is_better = True
                if found > state.scores[0] + FAR_OFF:
                    break
            if is_better:
                state.best[value] = decision
            else:
                state.here[value] = before
    return spent


COLDEST = 1e-5
"""Last temperature, as a share of the step."""
SWEPT_AT_ONCE = 8
"""Values that a descent tries before it asks whether to go on."""


class Walker:
    """State: what one thread needs to evaluate decisions; offers what it finds to the incumbents."""

    def __init__(
        self,
        problem: Problem,
        flat: FlatProblem,
        values: Sequence[int],
        incumbents: Incumbents,
        is_enough: Callable[[float], bool] = lambda step_s: False,
    ) -> None:
        """``is_enough`` says whether a step of so many seconds ends the search."""
        self.problem, self.values, self.incumbents, self._is_enough = problem, tuple(values), incumbents, is_enough
        self._evaluator = Evaluator(problem, flat)
        self._replayable = np.array([replay is not None for replay in problem.replay.replays])

    @property
    def _limits(self) -> Limits:
        return Limits(self.incumbents.within_bytes, self.incumbents.host_bytes)

    @property
    def _is_over(self) -> bool:
        return self._is_enough(self.incumbents.step_s)

    def try_styles(self, wish: Bytes, origin: str, styles: Sequence[int] = range(len(STYLES))) -> EvaluatedPlan:
        """Decisions in each of the styles; the best one."""
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
        space, state = search_space_of(self.problem, values), self._state(start, mate or start)
        rng, limits = np.random.default_rng(seed), self._limits
        while not allowance.is_spent and not self._is_over:
            if limits != self._limits:
                limits = self._limits
                state.scores[0] = score(self._evaluator, limits, int(state.styles[0]), state.here)
                state.scores[1] = score(self._evaluator, limits, int(state.styles[1]), state.best)
            steps = allowance.at_once()
            warmth = temperature * (COLDEST / temperature) ** allowance.progress
            draws = rng.random(steps * DRAWS)
            before = float(state.scores[1])
            walk_on(self._evaluator, space, state, limits, steps, warmth, draws)
            allowance.spend(steps)
            if state.scores[1] < before:
                self._offer_best(state, start.origin, is_end=False)
        return self._offer_best(state, start.origin)

    def descend(self, start: EvaluatedPlan, allowance: Allowance) -> EvaluatedPlan:
        """Tries each value with each other decision, the costliest first, until a whole round gains nothing."""
        order = np.array(sorted(self.values, key=lambda v: (-self._cost(start.wish, v), v)), dtype=np.int64)
        state = self._state(start, start)
        limits = self._limits
        last_gain = at = 0
        while at - last_gain < len(order) and not allowance.is_spent and not self._is_over:
            some = order[[(at + step) % len(order) for step in range(SWEPT_AT_ONCE)]]
            before = float(state.scores[0])
            spent = sweep(self._evaluator, self._replayable, state, limits, some)
            allowance.spend(spent)
            at += len(some)
            if state.scores[0] < before:
                last_gain = at
        return self._offer_best(state, start.origin)

    def _state(self, start: EvaluatedPlan, mate: EvaluatedPlan) -> ChainState:
        first = score(self._evaluator, self._limits, start.style, start.wish)
        return ChainState(
            here=start.wish.copy(),
            best=start.wish.copy(),
            trial=start.wish.copy(),
            mate=mate.wish.copy(),
            scores=np.array([first, first]),
            styles=np.array([start.style, start.style]),
        )

    def _offer_best(self, state: ChainState, origin: str, *, is_end: bool = True) -> EvaluatedPlan:
        """On the way only what takes no packing, or ends the search."""
        found = self._evaluated(state.best.copy(), int(state.styles[1]), origin)
        if is_end or self.incumbents.fitting is None or self._is_enough(found.step_s):
            return self.incumbents.offer(found)
        return found

    def _evaluated(self, wish: Bytes, style: int, origin: str) -> EvaluatedPlan:
        within_bytes = self.incumbents.within_bytes
        found = self._evaluator.evaluate_codes(wish, within_bytes, style)
        decisions = self._evaluator.codes.copy()
        return EvaluatedPlan(
            wish, decisions, style, found.step_s, found.peak_bytes, found.moved_bytes, origin, within_bytes
        )

    def _cost(self, wish: Bytes, value: int) -> float:
        if wish[value] == RECOMPUTE:
            return self.problem.replay_seconds(value)
        return self.problem.out_seconds(value) if wish[value] else 0.0


def search_space_of(problem: Problem, values: Sequence[int]) -> SearchSpace:
    """Where a walk over ``values`` may go."""
    size_bytes = problem.rounded_bytes
    by_size = sorted(values, key=lambda v: (int(size_bytes[v]), v))
    place = np.full(problem.value_count, -1, dtype=np.int64)
    place[by_size] = np.arange(len(by_size))
    members = _roles(problem, values)
    role = np.full(problem.value_count, -1, dtype=np.int64)
    for index, group in enumerate(members):
        role[group] = index
    return SearchSpace(
        values=np.array(values, dtype=np.int64),
        weights=np.array(list(accumulate(float(size_bytes[value]) ** 0.5 for value in values))),
        by_size=np.array(by_size, dtype=np.int64),
        place=place,
        replayable=np.array([replay is not None for replay in problem.replay.replays]),
        role=role,
        role_first=np.array([0, *accumulate(len(group) for group in members)], dtype=np.int64),
        role_values=np.array([value for group in members for value in group], dtype=np.int64),
    )


def _roles(problem: Problem, values: Sequence[int]) -> list[list[int]]:
    """Values of one size, one name but for its numbers, and replays of one length: the same role in repeated layers."""
    groups: dict[tuple[int, str, int], list[int]] = {}
    for value in values:
        replay = problem.replay.replays[value]
        name = re.sub(r"\d+", "", problem.names[value])
        key = int(problem.rounded_bytes[value]), name, -1 if replay is None else len(replay.ops)
        groups.setdefault(key, []).append(value)
    return list(groups.values())
