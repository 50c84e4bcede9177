"""Local search in the simulator: change decisions while the simulated step gets faster.

:func:`descend` ends in a local optimum; ``annealing.py`` leaves those that no single change leaves. Both go in a fixed
order, so that the same profile gives the same plan wherever their allowance suffices.
"""

from __future__ import annotations

from collections.abc import Sequence

from poochplan.formats.plan import Decision
from poochplan.planner.allowance import Budget
from poochplan.planner.judge.candidate import STYLES, Candidate, least_step_s, try_style
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.style import Style

MIN_GAIN = 1e-6
"""Smallest relative gain in step time that counts."""
SEARCH_STYLES = STYLES[:2]
FAR_OFF = 1.01
"""A change whose step is this much longer than the best one is not tried in another style."""


def descend(problem: Problem, start: Candidate, budget_bytes: int, values: Sequence[int], budget: Budget) -> Candidate:
    """Tries each of ``values`` with each other decision, the costliest first, until a whole round gains nothing."""
    best = start
    if not values or not can_gain(problem, best, budget_bytes):
        return best
    gained = True
    while gained:
        gained = False
        actual = best.schedule.decisions
        for value in sorted(values, key=lambda v: (-_cost(problem, actual[v], v), v)):
            for decision in other_decisions(problem, best, value):
                wish = list(best.wish)
                wish[value] = decision
                if best.peak_bytes <= budget_bytes and least_step_s(problem, wish) >= best.simulation.step_s:
                    continue
                for style in SEARCH_STYLES:
                    if not budget.spend():
                        return best
                    found = try_change(problem, best.policy, wish, budget_bytes, style)
                    if _is_better(found, best, budget_bytes):
                        best, gained = found, True
                    if found.simulation.step_s > best.simulation.step_s * FAR_OFF:
                        break
    return best


def try_change(problem: Problem, policy: str, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Candidate:
    """The changed decisions in one style, simulated; what to record for replays is not worked out."""
    return try_style(problem, policy, wish, budget_bytes, style, recorded=False)


def can_gain(problem: Problem, candidate: Candidate, budget_bytes: int) -> bool:
    """Whether there is anything to gain: time beyond the step that keeps all, or bytes over the budget."""
    is_slower = candidate.simulation.step_s > problem.keep_all_s * (1 + MIN_GAIN)
    return is_slower or candidate.peak_bytes > budget_bytes


def other_decisions(problem: Problem, candidate: Candidate, value: int) -> list[Decision]:
    """What else may be decided for a value than what the candidate wishes."""
    has_replay = problem.replay.replays[value] is not None
    wish = candidate.wish[value]
    return [d for d in Decision if d is not wish and (d is not Decision.RECOMPUTE or has_replay)]


def _is_better(found: Candidate, best: Candidate, budget_bytes: int) -> bool:
    found_over, found_s, _ = found.rank(budget_bytes)
    best_over, best_s, _ = best.rank(budget_bytes)
    return found_over < best_over or (found_over == best_over and found_s < best_s * (1 - MIN_GAIN))


def _cost(problem: Problem, decision: Decision, value: int) -> float:
    if decision is Decision.RECOMPUTE and problem.replay.replays[value] is not None:
        return problem.replay_seconds(value)
    return problem.out_seconds(value) if decision is Decision.SWAP else 0.0
