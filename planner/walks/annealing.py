"""One thread's walks: from decisions, as warm as it is told, until its allowance ends; and down to a local optimum."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from poochplan.planner.allowance import Allowance
from poochplan.planner.evaluator.codes import RECOMPUTE
from poochplan.planner.evaluator.evaluate import Evaluator
from poochplan.planner.evaluator.layout import Layout
from poochplan.planner.judge.candidate import STYLES
from poochplan.planner.problem.arrays import Bytes
from poochplan.planner.problem.problem import Problem

from .descent import sweep
from .incumbents import Found, Incumbents
from .walk import DRAWS, Ground, Limits, Trail, score, walk_on

COLDEST = 1e-5
"""Last temperature, as a share of the step."""
SWEPT_AT_ONCE = 8
"""Values that a descent tries before it asks whether to go on."""


class Walker:
    """State: what one thread needs to evaluate decisions; offers what it finds to the incumbents."""

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        values: Sequence[int],
        incumbents: Incumbents,
        is_enough: Callable[[float], bool] = lambda step_s: False,
    ) -> None:
        """``is_enough`` says whether a step of so many seconds ends the search."""
        self.problem, self.values, self.incumbents, self._is_enough = problem, tuple(values), incumbents, is_enough
        self._evaluator = Evaluator(problem, layout)
        self._replayable = np.array([replay is not None for replay in problem.replay.replays])

    @property
    def _limits(self) -> Limits:
        return Limits(self.incumbents.within_bytes, self.incumbents.host_bytes)

    @property
    def _is_over(self) -> bool:
        return self._is_enough(self.incumbents.step_s)

    def try_styles(self, wish: Bytes, origin: str, styles: Sequence[int] = range(len(STYLES))) -> Found:
        """Decisions in each of the styles; the best one."""
        tried = [self.incumbents.offer(self._evaluated(wish, style, origin)) for style in styles]
        return min(tried, key=self.incumbents.rank)

    def anneal(
        self,
        start: Found,
        allowance: Allowance,
        *,
        temperature: float,
        seed: int,
        pinned: Sequence[int] = (),
        mate: Found | None = None,
    ) -> Found:
        """The best plan met on a walk that also takes changes for the worse, less and less often.

        ``temperature`` is the loss, as a share of the step, that is taken with probability 1/e at the start; it falls
        to :data:`COLDEST`. The values of ``pinned`` do not change. ``mate`` is another plan, to take decisions from.
        """
        values = [value for value in self.values if value not in set(pinned)]
        if not values:
            return start
        ground, trail = ground_of(self.problem, values), self._trail(start, mate or start)
        rng, limits = np.random.default_rng(seed), self._limits
        while not allowance.is_spent and not self._is_over:
            if limits != self._limits:
                limits = self._limits
                trail.scores[0] = score(self._evaluator, limits, int(trail.styles[0]), trail.here)
                trail.scores[1] = score(self._evaluator, limits, int(trail.styles[1]), trail.best)
            steps = allowance.at_once()
            warmth = temperature * (COLDEST / temperature) ** allowance.progress
            draws = rng.random(steps * DRAWS)
            before = float(trail.scores[1])
            walk_on(self._evaluator, ground, trail, limits, steps, warmth, draws)
            allowance.spend(steps)
            if trail.scores[1] < before:
                self._offer_best(trail, start.origin, is_end=False)
        return self._offer_best(trail, start.origin)

    def descend(self, start: Found, allowance: Allowance) -> Found:
        """Tries each value with each other decision, the costliest first, until a whole round gains nothing."""
        order = np.array(sorted(self.values, key=lambda v: (-self._cost(start.wish, v), v)), dtype=np.int64)
        trail = self._trail(start, start)
        limits = self._limits
        last_gain = at = 0
        while at - last_gain < len(order) and not allowance.is_spent and not self._is_over:
            some = order[[(at + step) % len(order) for step in range(SWEPT_AT_ONCE)]]
            before = float(trail.scores[0])
            spent = sweep(self._evaluator, self._replayable, trail, limits, some)
            allowance.spend(spent)
            at += len(some)
            if trail.scores[0] < before:
                last_gain = at
        return self._offer_best(trail, start.origin)

    def _trail(self, start: Found, mate: Found) -> Trail:
        first = score(self._evaluator, self._limits, start.style, start.wish)
        return Trail(
            here=start.wish.copy(),
            best=start.wish.copy(),
            trial=start.wish.copy(),
            mate=mate.wish.copy(),
            scores=np.array([first, first]),
            styles=np.array([start.style, start.style]),
        )

    def _offer_best(self, trail: Trail, origin: str, *, is_end: bool = True) -> Found:
        """On the way only what takes no packing, or ends the search."""
        found = self._evaluated(trail.best.copy(), int(trail.styles[1]), origin)
        if is_end or self.incumbents.fitting is None or self._is_enough(found.step_s):
            return self.incumbents.offer(found)
        return found

    def _evaluated(self, wish: Bytes, style: int, origin: str) -> Found:
        within_bytes = self.incumbents.within_bytes
        found = self._evaluator.evaluate_codes(wish, within_bytes, style)
        decisions = self._evaluator.codes.copy()
        return Found(wish, decisions, style, found.step_s, found.peak_bytes, found.moved_bytes, origin, within_bytes)

    def _cost(self, wish: Bytes, value: int) -> float:
        if wish[value] == RECOMPUTE:
            return self.problem.replay_seconds(value)
        return self.problem.out_seconds(value) if wish[value] else 0.0


def ground_of(problem: Problem, values: Sequence[int]) -> Ground:
    """Where a walk over ``values`` may go."""
    size_bytes = problem.rounded_bytes
    by_size = sorted(values, key=lambda v: (int(size_bytes[v]), v))
    place = np.full(problem.value_count, -1, dtype=np.int64)
    place[by_size] = np.arange(len(by_size))
    members = _roles(problem, values)
    role = np.full(problem.value_count, -1, dtype=np.int64)
    for index, group in enumerate(members):
        role[group] = index
    return Ground(
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
