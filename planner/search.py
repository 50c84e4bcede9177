"""Local search in the simulator: change one decision, then two at a time, while the simulated step gets faster."""

from __future__ import annotations

import random
import time

from .candidate import STYLES, Candidate, movable, try_style
from .problem import Problem
from .schema import Decision

MIN_GAIN = 1e-6
"""Smallest relative gain in step time that counts."""
SEED = 0
"""Pairs are drawn from a fixed sequence, so that the same profile gives the same plan."""
MAX_PAIRS = 300
"""Pairs find what single changes miss on steps of a few values; on longer ones they were never seen to gain."""
SEARCH_STYLES = STYLES[:2]


def improve(
    problem: Problem, start: Candidate, budget_bytes: int, *, evaluations: int = 1000, time_limit_s: float = 4.0
) -> Candidate:
    """The best plan found by changing decisions of ``start``; never worse than it.

    Every value is tried with each other decision, the costliest first, until a whole round gains nothing; what is left
    of ``evaluations`` goes to random pairs. ``time_limit_s`` is a safety net, which lets the result depend on speed.
    """
    search = _Search(problem, start, budget_bytes, evaluations, time.perf_counter() + time_limit_s)
    if start.simulation.step_s > problem.step_s * (1 + MIN_GAIN) or start.peak_bytes > budget_bytes:
        while search.try_each_value():
            pass
        search.try_pairs()
    return search.best


class _Search:
    """State: the best plan so far, and how many evaluations are left."""

    def __init__(
        self, problem: Problem, start: Candidate, budget_bytes: int, evaluations: int, deadline_s: float
    ) -> None:
        self.problem, self.best, self.budget_bytes = problem, start, budget_bytes
        self._left, self._deadline_s = evaluations, deadline_s
        self._movable = movable(problem)

    @property
    def is_over(self) -> bool:
        return self._left <= 0 or time.perf_counter() > self._deadline_s

    def try_each_value(self) -> bool:
        """One round over all values; whether it gained anything."""
        actual = self.best.schedule.decisions
        gained = False
        for value in sorted(self._movable, key=lambda v: (-self._cost(actual[v], v), v)):
            for decision in self._others(value):
                if self.is_over:
                    return False
                gained |= self._try({value: decision})
        return gained

    def try_pairs(self) -> None:
        """Random pairs of changes until the evaluations are used up."""
        rng = random.Random(SEED)
        if len(self._movable) < 2:
            return
        for _ in range(min(MAX_PAIRS, 4 * len(self._movable) ** 2)):
            if self.is_over:
                return
            one, other = rng.sample(self._movable, 2)
            self._try({value: rng.choice(self._others(value)) for value in (one, other)})

    def _others(self, value: int) -> list[Decision]:
        has_replay = self.problem.replay.replays[value] is not None
        wish = self.best.wish[value]
        return [d for d in Decision if d is not wish and (d is not Decision.RECOMPUTE or has_replay)]

    def _try(self, changes: dict[int, Decision]) -> bool:
        wish = list(self.best.wish)
        for value, decision in changes.items():
            wish[value] = decision
        gained = False
        for style in SEARCH_STYLES:
            self._left -= 1
            found = try_style(self.problem, self.best.policy, wish, self.budget_bytes, style)
            if self._is_better(found):
                self.best, gained = found, True
        return gained

    def _is_better(self, found: Candidate) -> bool:
        found_over, found_s, _ = found.rank(self.budget_bytes)
        best_over, best_s, _ = self.best.rank(self.budget_bytes)
        return found_over < best_over or (found_over == best_over and found_s < best_s * (1 - MIN_GAIN))

    def _cost(self, decision: Decision, value: int) -> float:
        replay = self.problem.replay.replays[value]
        if decision is Decision.RECOMPUTE and replay is not None:
            return replay.seconds
        return self.problem.out_seconds(value) if decision is Decision.SWAP else 0.0
