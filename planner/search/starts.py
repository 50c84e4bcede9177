"""Plans that stand beside the ILP: one is found even where the solver finds none."""

from __future__ import annotations

from collections.abc import Iterator

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import Candidate, movable, swap_all, swap_all_on_demand, try_decisions
from poochplan.planner.problem.problem import Problem

RECOMPUTE_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def simple_plans(problem: Problem, budget_bytes: int) -> Iterator[Candidate]:
    """Swap-all (on demand, and with prefetch), recompute-all, and mixes: the cheapest replays, the rest swapped."""
    yield swap_all_on_demand(problem)
    yield try_decisions(problem, "swap-all", swap_all(problem), budget_bytes)
    replayable = sorted(
        (value for value in movable(problem) if problem.replay.replays[value] is not None),
        key=lambda value: (_replay_seconds_per_byte(problem, value), value),
    )
    for share in RECOMPUTE_SHARES:
        wish = list(swap_all(problem))
        for value in replayable[: round(len(replayable) * share)]:
            wish[value] = Decision.RECOMPUTE
        name = "recompute-all" if share == 1.0 else f"recompute {share:.0%}, swap the rest"
        yield try_decisions(problem, name, wish, budget_bytes)


def _replay_seconds_per_byte(problem: Problem, value: int) -> float:
    return problem.replay_seconds(value) / max(1, int(problem.rounded_bytes[value]))
