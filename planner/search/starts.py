"""Decisions that stand beside the ILP's: a plan is found even where the solver finds none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import movable, swap_all
from poochplan.planner.problem.problem import Problem

RECOMPUTE_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def simple_decisions(problem: Problem) -> Iterator[tuple[str, tuple[Decision, ...]]]:
    """By name: swap-all, recompute-all, and mixes: the cheapest replays, the rest swapped."""
    yield "swap-all", swap_all(problem)
    replayable = sorted(
        (value for value in movable(problem) if problem.replay.replays[value] is not None),
        key=lambda value: (_replay_seconds_per_byte(problem, value), value),
    )
    for share in RECOMPUTE_SHARES:
        wish = list(swap_all(problem))
        for value in replayable[: round(len(replayable) * share)]:
            wish[value] = Decision.RECOMPUTE
        name = "recompute-all" if share == 1.0 else f"recompute {share:.0%}, swap the rest"
        yield name, tuple(wish)


def all_decisions(problem: Problem, most: int) -> list[tuple[Decision, ...]] | None:
    """Every way to decide; None where there are more than ``most``."""
    choices = [_choices(problem, value) for value in range(problem.value_count)]
    if prod(len(choice) for choice in choices) > most:
        return None
    return list(product(*choices))


def _choices(problem: Problem, value: int) -> tuple[Decision, ...]:
    if problem.must_keep[value]:
        return (Decision.KEEP,)
    if problem.replay.replays[value] is None:
        return Decision.KEEP, Decision.SWAP
    return tuple(Decision)


def tiny_values(problem: Problem, room_bytes: int, share: float) -> frozenset[int]:
    """Values that together hold less than a share of the saved bytes; none where ``room_bytes`` do not hold them."""
    total = int(problem.rounded_bytes.sum())
    tiny: set[int] = set()
    held = 0
    for value in sorted(movable(problem), key=lambda v: (int(problem.rounded_bytes[v]), v)):
        held += int(problem.rounded_bytes[value])
        if held > total * share:
            break
        tiny.add(value)
    return frozenset(tiny) if held <= room_bytes else frozenset()


def _replay_seconds_per_byte(problem: Problem, value: int) -> float:
    return problem.replay_seconds(value) / max(1, int(problem.rounded_bytes[value]))
