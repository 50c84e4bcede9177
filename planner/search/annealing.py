"""Annealing in the simulator: a walk that leaves local optima that no single change leaves.

Two large values that trade places are one. The walk draws from a fixed sequence, so that the same profile gives the
same plan wherever its allowance suffices.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from poochplan.formats.plan import Decision
from poochplan.planner.allowance import Budget
from poochplan.planner.judge.candidate import Candidate
from poochplan.planner.problem.problem import Problem

from .descent import SEARCH_STYLES, can_gain, other_decisions, try_change

SEED = 0
OVER_BUDGET = 0.02
"""Share of the step that being over budget costs while annealing, plus ``OVER_BUDGET_SLOPE`` times the share over."""
OVER_BUDGET_SLOPE = 5.0
COLDEST = 1e-6
"""Last temperature, as a share of the step."""


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
    if not values or not can_gain(problem, start, budget_bytes):
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
        found = try_change(self.problem, self.here.policy, wish, self.budget_bytes, style)
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
            wish[value] = self.rng.choice(other_decisions(self.problem, self.here, value))
        return wish

    def _is_possible(self, value: int, decision: Decision) -> bool:
        return decision is not Decision.RECOMPUTE or self.problem.replay.replays[value] is not None
