"""Local search in the simulator: change decisions while the simulated step gets faster.

``anneal`` leaves local optima that no single change leaves (two large values that trade places); ``descend`` ends in
one. Both draw from a fixed sequence, so that the same profile gives the same plan wherever their allowance suffices.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from .allowance import Budget
from .candidate import STYLES, Candidate, least_step_s, try_style
from .problem import Problem
from .schema import Decision
from .style import Style

MIN_GAIN = 1e-6
"""Smallest relative gain in step time that counts."""
SEED = 0
SEARCH_STYLES = STYLES[:2]
OVER_BUDGET = 0.02
"""Share of the step that being over budget costs while annealing, plus ``OVER_BUDGET_SLOPE`` times the share over."""
OVER_BUDGET_SLOPE = 5.0
FAR_OFF = 1.01
"""A change whose step is this much longer than the best one is not tried in another style."""
COLDEST = 1e-6
"""Last temperature, as a share of the step."""


def descend(problem: Problem, start: Candidate, budget_bytes: int, values: Sequence[int], budget: Budget) -> Candidate:
    """Tries each of ``values`` with each other decision, the costliest first, until a whole round gains nothing."""
    best = start
    if not values or not _can_gain(problem, best, budget_bytes):
        return best
    gained = True
    while gained:
        gained = False
        actual = best.schedule.decisions
        for value in sorted(values, key=lambda v: (-_cost(problem, actual[v], v), v)):
            for decision in _others(problem, best, value):
                wish = list(best.wish)
                wish[value] = decision
                if best.peak_bytes <= budget_bytes and least_step_s(problem, wish) >= best.simulation.step_s:
                    continue
                for style in SEARCH_STYLES:
                    if not budget.spend():
                        return best
                    found = _try(problem, best.policy, wish, budget_bytes, style)
                    if _is_better(found, best, budget_bytes):
                        best, gained = found, True
                    if found.simulation.step_s > best.simulation.step_s * FAR_OFF:
                        break
    return best


def anneal(
    problem: Problem,
    start: Candidate,
    budget_bytes: int,
    values: Sequence[int],
    budget: Budget,
    *,
    temperature: float,
    seed: int = SEED,
) -> Candidate:
    """The best plan met on a walk that also takes changes of ``values`` for the worse, less and less often.

    ``temperature`` is the loss, as a share of the step, that is taken with probability 1/e at the start.
    """
    if not values or not _can_gain(problem, start, budget_bytes):
        return start
    walk = _Walk(problem, start, budget_bytes, values, random.Random(seed))
    total = max(1, budget.left)
    while budget.spend():
        warmth = (max(0, budget.left) / total) ** 2
        walk.step(max(COLDEST, temperature * warmth))
    return walk.best


class _Walk:
    """State: where the walk is, and the best plan it met."""

    def __init__(
        self, problem: Problem, start: Candidate, budget_bytes: int, values: Sequence[int], rng: random.Random
    ) -> None:
        self.problem, self.budget_bytes, self.values, self.rng = problem, budget_bytes, values, rng
        sizes = [float(problem.rounded_bytes[value]) for value in self.values]
        self.weights = list(accumulate(size**0.5 for size in sizes))
        self.by_size = sorted(self.values, key=lambda v: (int(problem.rounded_bytes[v]), v))
        self.place = {value: place for place, value in enumerate(self.by_size)}
        self.here = self.best = start
        self.here_score = self.best_score = self._score(start)

    def step(self, temperature: float) -> None:
        """One change, taken or not."""
        wish = self._neighbour()
        if wish == list(self.here.wish):
            return
        style = SEARCH_STYLES[self.rng.random() < 0.3]
        found = _try(self.problem, self.here.policy, wish, self.budget_bytes, style)
        score = self._score(found)
        loss = score - self.here_score
        if loss <= 0 or self.rng.random() < math.exp(-loss / temperature):
            self.here, self.here_score = found, score
            if score < self.best_score:
                self.best, self.best_score = found, score

    def _score(self, candidate: Candidate) -> float:
        over = max(0, candidate.peak_bytes - self.budget_bytes) / max(1, self.budget_bytes)
        share = candidate.simulation.step_s / self.problem.step_s if self.problem.step_s > 0 else 1.0
        return share + (OVER_BUDGET + OVER_BUDGET_SLOPE * over if over else 0.0)

    def _draw(self) -> int:
        return self.values[bisect(self.weights, self.rng.random() * self.weights[-1], hi=len(self.values) - 1)]

    def _neighbour(self) -> list[Decision]:
        """One to three changed decisions, or two values of like size that trade theirs."""
        wish = list(self.here.wish)
        if self.rng.random() < 0.3:
            one = self._draw()
            near = self.place[one] + self.rng.choice((-3, -2, -1, 1, 2, 3))
            other = self.by_size[near % len(self.by_size)]
            wish[one], wish[other] = wish[other], wish[one]
            if all(self._is_possible(value, wish[value]) for value in (one, other)):
                return wish
            wish = list(self.here.wish)
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3))):
            value = self._draw()
            wish[value] = self.rng.choice(_others(self.problem, self.here, value))
        return wish

    def _is_possible(self, value: int, decision: Decision) -> bool:
        return decision is not Decision.RECOMPUTE or self.problem.replay.replays[value] is not None


def _try(problem: Problem, policy: str, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Candidate:
    return try_style(problem, policy, wish, budget_bytes, style, recorded=False)


def _can_gain(problem: Problem, candidate: Candidate, budget_bytes: int) -> bool:
    is_slower = candidate.simulation.step_s > problem.step_s * (1 + MIN_GAIN)
    return is_slower or candidate.peak_bytes > budget_bytes


def _others(problem: Problem, candidate: Candidate, value: int) -> list[Decision]:
    has_replay = problem.replay.replays[value] is not None
    wish = candidate.wish[value]
    return [d for d in Decision if d is not wish and (d is not Decision.RECOMPUTE or has_replay)]


def _is_better(found: Candidate, best: Candidate, budget_bytes: int) -> bool:
    found_over, found_s, _ = found.rank(budget_bytes)
    best_over, best_s, _ = best.rank(budget_bytes)
    return found_over < best_over or (found_over == best_over and found_s < best_s * (1 - MIN_GAIN))


def _cost(problem: Problem, decision: Decision, value: int) -> float:
    replay = problem.replay.replays[value]
    if decision is Decision.RECOMPUTE and replay is not None:
        return replay.seconds
    return problem.out_seconds(value) if decision is Decision.SWAP else 0.0
