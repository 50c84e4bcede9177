"""When decisions need which value back: the points of replays, and of what they start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poochplan.formats.plan import Decision

from .arrays import Ints
from .problem import Problem


@dataclass(frozen=True)
class Needs:
    """When given decisions need which value in backward."""

    points: tuple[tuple[int, ...], ...]
    """Per value: the points up to its first use that need it on the device, in order."""
    back_point: tuple[int, ...]
    """Per value: the first of them; for a recomputed one that of its replay; -1 when there is none."""
    last_claim: Ints
    """Per value: the last tick at which a replay needs it; -1 when none does."""
    replays: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(point, value asked for, all values this replay brings back), in the order in which they run."""


def needs_of(problem: Problem, decisions: Sequence[Decision], replay_at: Mapping[int, int] | None = None) -> Needs:
    """What ``decisions`` need back, and when.

    A replay is at the first use of its value, or earlier where ``replay_at`` (value -> use point) says so; at one point
    those come first, in the order of ``replay_at``.
    """
    count = problem.value_count
    back = [-1] * count
    points: list[list[int]] = [[] for _ in range(count)]
    claim = np.full(count, -1, dtype=np.int64)
    replays = []
    for point, _, value in _in_order(problem, decisions, replay_at or {}):
        if decisions[value] is not Decision.RECOMPUTE:
            points[value].append(point)
            continue
        if back[value] >= 0:
            continue
        targets = replay_closure(problem, decisions, value, back)
        for target in targets:
            back[target] = point
            replay = problem.replay.replays[target]
            assert replay is not None
            for source in replay.inputs:
                claim[source] = problem.point_ticks[point]
        for source in problem.replay.merged(targets).inputs:
            use = problem.first_use_point[source]
            if use < 0 or point < use:
                points[source].append(point)
        replays.append((point, value, targets))
    for value, needed in enumerate(points):
        if decisions[value] is not Decision.RECOMPUTE and needed:
            back[value] = needed[0]
    claim_for_never_replayed(problem, decisions, back, claim)
    return Needs(tuple(map(tuple, points)), tuple(back), claim, tuple(replays))


def _in_order(
    problem: Problem, decisions: Sequence[Decision], replay_at: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """(point, order at the point, value): when each value is asked for, a replay before the use at its point."""
    last = len(replay_at)
    order = [(point, last, value) for value, point in enumerate(problem.first_use_point) if point >= 0]
    for position, (value, point) in enumerate(replay_at.items()):
        if decisions[value] is Decision.RECOMPUTE and may_replay_at(problem, value, point):
            order.append((point, position, value))
    return sorted(order)


def may_replay_at(problem: Problem, value: int, point: int) -> bool:
    """Whether a use point is early enough for a replay of ``value``: what it starts from is still held."""
    use = problem.first_use_point[value]
    return point <= use if use >= 0 else problem.point_tick_list[point] <= problem.freed[value]


def replay_closure(problem: Problem, decisions: Sequence[Decision], value: int, back: Sequence[int]) -> tuple[int, ...]:
    """The values one replay of ``value`` brings back: itself and the recomputed values it starts from, not yet back."""
    targets = {value}
    pending = [value]
    while pending:
        replay = problem.replay.replays[pending.pop()]
        assert replay is not None
        for source in replay.inputs:
            if decisions[source] is Decision.RECOMPUTE and back[source] < 0 and source not in targets:
                targets.add(source)
                pending.append(source)
    return tuple(sorted(targets))


def claim_for_never_replayed(problem: Problem, decisions: Sequence[Decision], back: Sequence[int], claim: Ints) -> None:
    """Extends ``claim``: a recomputed value that never comes back claims its inputs as long as it is itself held."""
    replays = problem.replay.replays
    pending = [
        (replay.ops[-1], value, replay.inputs)
        for value, replay in enumerate(replays)
        if replay is not None and decisions[value] is Decision.RECOMPUTE and back[value] < 0
    ]
    for _, value, inputs in sorted(pending, reverse=True):  # what holds a value comes after it
        until = max(int(problem.freed[value]), int(claim[value]))
        for source in inputs:
            claim[source] = max(int(claim[source]), until)
