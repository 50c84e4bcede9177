"""Annealing and descent: one thread's walks through decisions; and the best plans so far, found by several threads.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983). Each step changes a few
decisions and evaluates them; a change for the worse is taken with probability ``exp(-loss / temperature)``. The random
numbers come from outside, so that the same numbers give the same walk. With an arena, only plans whose arena fits the
budget count.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, inf
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Codes
from poochplan.planner.arena.step_layout import Fitting
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, STYLE_OF, SWAP, Evaluator, decisions_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import STYLES, Candidate, try_style

KEPT = 2500
"""This many plans with the shortest steps are remembered; all of them if all ways to decide are tried."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """Decisions and a style, evaluated."""

    wish: Codes
    """The requested decisions, by their codes."""
    decisions: Codes
    """The resulting decisions: a value that memory never requires to be released is kept."""
    style: int
    step_s: float
    peak_bytes: int
    """Most live bytes, including in the first step."""
    moved_bytes: int
    """Bytes over the link, both ways."""
    origin: str
    """Source of the decisions: a policy's name, or ``ilp`` for those of a model."""
    within_bytes: int
    """The live bytes for which its schedule was made."""
    arena_bytes: int = 0
    """If its arena does not fit: the bytes that the arena takes, or is estimated to take."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that a budget must hold."""
        return max(self.peak_bytes, self.arena_bytes)


class Incumbents:
    """State: the plans that count. Every method may be called by any thread."""

    def __init__(
        self, problem: Problem, budget_bytes: int, host_bytes: int | None, fitting: Fitting | None = None
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.host_bytes = -1 if host_bytes is None else host_bytes
        """Most bytes swapped out; -1 if there is no limit."""
        self._fitting, self.unfit = fitting, fitting.unfit if fitting is not None else ""
        """Note of a plan that does not fit where ``fitting`` looks."""
        self._lock = threading.Lock()
        self._plans: dict[tuple[bytes, int], EvaluatedPlan] = {}
        self.step_s = inf
        """Seconds of the shortest step within the budget; infinite if there is none."""

    @property
    def fitting(self) -> Fitting | None:
        """Packs the best plans; None if the budget covers live bytes alone."""
        return None if self._fitting is None or self._fitting.is_hopeless else self._fitting

    @property
    def within_bytes(self) -> int:
        """Live bytes that a plan may have: the budget minus the bytes that packing adds."""
        return self.budget_bytes if self.fitting is None else self.fitting.within_bytes

    def offer(self, found: EvaluatedPlan) -> EvaluatedPlan:
        """Remembers a plan if it is among the best. A plan that needs more host memory than there is never is.

        A plan that would be the best one is packed first. If its arena does not fit, it is returned with the bytes that
        the arena takes, or is estimated to take.
        """
        if not self.fits(found.decisions):
            return found
        fitting = self.fitting
        if fitting is not None and found.peak_bytes <= self.budget_bytes and found.step_s < self.step_s:
            over_bytes = found.peak_bytes - fitting.within_bytes
            needed_bytes = self.budget_bytes + over_bytes if over_bytes > 0 else fitting.pack(self.simulated(found))
            found = replace(found, arena_bytes=needed_bytes) if needed_bytes > self.budget_bytes else found
        with self._lock:
            self._plans[found.wish.tobytes(), found.style] = found
            if len(self._plans) > 2 * KEPT:
                self._plans = dict(sorted(self._plans.items(), key=lambda item: self.rank(item[1]))[:KEPT])
            if found.needed_bytes <= self.budget_bytes:
                self.step_s = min(self.step_s, found.step_s)
        return found

    def ranked(self) -> list[EvaluatedPlan]:
        """The best plan first: by the bytes that a budget must hold, or by live bytes alone if no arena fits."""
        return sorted(self._all(is_live=self.fitting is None), key=self.rank)

    def best(self, *, is_live: bool = False) -> EvaluatedPlan:
        """The plan with the shortest step within the budget, else that with the fewest bytes above it.

        ``is_live``: the budget covers live bytes alone, for example because the search ended without an arena that
        fits.
        """
        return min(self._all(is_live=is_live), key=self.rank)

    def _all(self, *, is_live: bool) -> list[EvaluatedPlan]:
        with self._lock:
            return [replace(found, arena_bytes=0) if is_live else found for found in self._plans.values()]

    def simulated(self, found: EvaluatedPlan) -> Candidate:
        """The same plan with its schedule, by the simulator."""
        wish = decisions_of(found.wish)
        return try_style(self.problem, found.origin, wish, found.within_bytes, STYLE_OF[found.style])

    def fits(self, decisions: Codes) -> bool:
        """Whether the host has room for the values that a plan swaps."""
        return self.host_bytes < 0 or int(self.problem.size_bytes[decisions == SWAP].sum()) <= self.host_bytes

    def rank(self, found: EvaluatedPlan) -> tuple[int, float, bool, int, bytes]:
        """Smaller is better. Of plans equal to a millionth of the step, that of the model itself is preferred."""
        over_bytes = max(0, found.needed_bytes - self.budget_bytes)
        step = round(found.step_s / self.problem.step_s * 1e6) if self.problem.step_s > 0 else 0
        return over_bytes, step, found.origin != "ilp", found.moved_bytes, found.wish.tobytes()


OVER_BUDGET, OVER_BUDGET_SLOPE = 0.02, 5.0
"""Cost, as a share of the step, of being over budget in a walk; the second times the excess share is added."""
DRAWS = 48
"""More random numbers than one step uses."""
LONGEST_RUN = 24
"""Most values of one role, or of a stretch of them, that are changed together."""
LONGEST_STRETCH = 0.25
"""Largest share of a role that is changed together, and of all values that is taken over from another plan."""
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
    """The step as a share of the one that keeps all; more if the peak, or the host, exceeds its budget."""
    problem, budget_bytes = evaluator.problem, limits.budget_bytes
    found = evaluator.evaluate_codes(codes, budget_bytes, style)
    share = found.step_s / problem.step_s if problem.step_s > 0.0 else 1.0
    taken = [(found.peak_bytes, budget_bytes)]
    if limits.host_bytes >= 0:
        taken.append((int(problem.size_bytes[evaluator.codes == SWAP].sum()), limits.host_bytes))
    for size_bytes, most_bytes in taken:
        if size_bytes > most_bytes:
            share += OVER_BUDGET + OVER_BUDGET_SLOPE * (size_bytes - most_bytes) / max(1, most_bytes)
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
    """A walk's next position. ``mate``: another plan, to copy from; ``draws``: :data:`DRAWS` random numbers."""
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
    away = (1 + int(draws[2] * 3)) * (-1 if draws[3] < 0.5 else 1)
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


def sweep(evaluator: Evaluator, limits: Limits, here: Scored, values: Iterable[int]) -> tuple[Scored, int]:
    """Tries each value with each other decision; takes at once what gains. Returns the result and the evaluations."""
    replays, spent = evaluator.problem.replay.replays, 0
    for value in values:
        for decision in (KEEP, SWAP, RECOMPUTE):
            if decision == here.codes[value] or (decision == RECOMPUTE and replays[value] is None):
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
    """State: what one thread needs to evaluate decisions. It offers the plans that it finds to the incumbents."""

    def __init__(
        self,
        values: Sequence[int],
        incumbents: Incumbents,
        is_enough: Callable[[float], bool] = lambda step_s: False,
    ) -> None:
        """``is_enough`` says whether a step of that many seconds ends the search."""
        self.problem, self.values, self.incumbents = incumbents.problem, tuple(values), incumbents
        self._is_enough, self._evaluator = is_enough, Evaluator(incumbents.problem)

    @property
    def _limits(self) -> Limits:
        return Limits(self.incumbents.within_bytes, self.incumbents.host_bytes)

    def _goes_on(self, allowance: Allowance) -> bool:
        return not allowance.is_spent and not self._is_enough(self.incumbents.step_s)

    def try_styles(self, wish: Codes, origin: str, styles: Sequence[int] = range(len(STYLES))) -> EvaluatedPlan:
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
        while self._goes_on(allowance):
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
        order = sorted(self.values, key=lambda v: (-self._seconds(start.wish, v), v))
        limits = self._limits
        here = scored(self._evaluator, limits, start.style, start.wish.tobytes())
        last_gain = at = 0
        while at - last_gain < len(order) and self._goes_on(allowance):
            some = [order[(at + step) % len(order)] for step in range(SWEPT_AT_ONCE)]
            before = here
            here, spent = sweep(self._evaluator, limits, here, some)
            allowance.spend(spent)
            at += SWEPT_AT_ONCE
            if here is not before:
                last_gain = at
        return self._offer(here, start.origin)

    def _offer(self, best: Scored, origin: str, *, is_end: bool = True) -> EvaluatedPlan:
        """During the walk, offers only plans that need no packing, or that end the search."""
        found = self._evaluated(np.frombuffer(best.codes, dtype=np.int8), best.style, origin)
        if is_end or self.incumbents.fitting is None or self._is_enough(found.step_s):
            return self.incumbents.offer(found)
        return found

    def _evaluated(self, wish: Codes, style: int, origin: str) -> EvaluatedPlan:
        within_bytes = self.incumbents.within_bytes
        step_s, peak_bytes, moved_bytes, _ = self._evaluator.evaluate_codes(wish.tobytes(), within_bytes, style)
        decisions = self._evaluator.codes.copy()
        return EvaluatedPlan(wish, decisions, style, step_s, peak_bytes, moved_bytes, origin, within_bytes)

    def _seconds(self, wish: Codes, value: int) -> float:
        if wish[value] == RECOMPUTE:
            return self.problem.replay_seconds(value)
        return self.problem.out_seconds(value) if wish[value] else 0.0


def search_space_of(problem: Problem, values: Sequence[int]) -> SearchSpace:
    """The space of a walk over ``values``. Those of the same size, the same name except for its numbers, and replays
    of the same length have the same role in repeated layers.
    """
    size_bytes, replays = problem.rounded_bytes.tolist(), problem.replay.replays
    by_size = sorted(values, key=lambda v: (size_bytes[v], v))
    groups: dict[tuple[int, str, int], list[int]] = {}
    for value in values:
        replay, name = replays[value], re.sub(r"\d+", "", problem.names[value])
        groups.setdefault((size_bytes[value], name, -1 if replay is None else len(replay.ops)), []).append(value)
    roles = list(groups.values())
    return SearchSpace(
        values=values,
        weights=list(accumulate(float(size_bytes[value]) ** 0.5 for value in values)),
        by_size=by_size,
        place={value: place for place, value in enumerate(by_size)},
        replayable=[replay is not None for replay in replays],
        roles=roles,
        role={value: role for role in roles for value in role},
    )
