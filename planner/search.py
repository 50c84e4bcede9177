"""Local search in the simulator: flip one decision at a time while the simulated step gets faster."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .policies import STYLES, Candidate, movable, try_style
from .problem import Problem
from .schema import Decision

MIN_GAIN = 1e-6
"""Smallest relative gain in step time that counts."""


def improve(
    problem: Problem, start: Candidate, budget_bytes: int, *, evaluations: int = 400, time_limit_s: float = 4.0
) -> Candidate:
    """The best plan found by flipping single decisions of ``start``; never worse than it."""
    deadline_s = time.perf_counter() + time_limit_s
    best = start
    left = evaluations
    improved = True
    while improved and left > 0:
        improved = False
        for wish in list(_neighbours(problem, best)):
            if left <= 0 or time.perf_counter() > deadline_s:
                return best
            for style in STYLES[:2]:
                left -= 1
                found = try_style(problem, start.policy, wish, budget_bytes, style)
                if _is_better(found, best, budget_bytes):
                    best, improved = found, True
    return best


def _is_better(found: Candidate, best: Candidate, budget_bytes: int) -> bool:
    found_over, found_s, _ = found.rank(budget_bytes)
    best_over, best_s, _ = best.rank(budget_bytes)
    return found_over < best_over or (found_over == best_over and found_s < best_s * (1 - MIN_GAIN))


def _neighbours(problem: Problem, candidate: Candidate) -> Iterator[tuple[Decision, ...]]:
    """Decisions that differ in one value, the values that cost most time first."""
    wish = candidate.wish
    actual = candidate.schedule.decisions
    for value in sorted(movable(problem), key=lambda v: (-_cost(problem, actual[v], v), v)):
        others = [decision for decision in Decision if decision is not wish[value]]
        for decision in others:
            if decision is not Decision.RECOMPUTE or problem.replay.replays[value] is not None:
                yield (*wish[:value], decision, *wish[value + 1 :])


def _cost(problem: Problem, decision: Decision, value: int) -> float:
    replay = problem.replay.replays[value]
    if decision is Decision.RECOMPUTE and replay is not None:
        return replay.seconds
    return problem.out_seconds(value) if decision is Decision.SWAP else 0.0
