"""Local search over the schedule of given decisions: the simulator shows where the step waits, and whether a change
helps.

A move changes one thing of a :class:`Tuning`: a replay runs earlier, a value leaves later, a queue gets another order.
After each move the schedule is fitted again, so that memory stays within the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import Decision
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import EvaluatedPlan
from poochplan.planner.simulator.construct import may_replay_at
from poochplan.planner.simulator.evaluator import SWAP, decisions_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import AS_STYLED, MOVES, Style, Tuning, points_of
from poochplan.planner.simulator.simulate import STYLES, Candidate, least_step_s, try_style

ALL_MOVES = 8
"""With at most this many values that move, every move is tried."""
WAITS = 12
"""On large steps, the longest waits near which moves are tried."""
NEAR = 4
"""On large steps, how many values or points before and after a wait are tried."""


class ScheduleMoves:
    """The possible changes of a schedule."""

    def __init__(self, problem: Problem, tuning: Tuning, candidate: Candidate) -> None:
        self.problem, self.tuning, self.candidate = problem, tuning, candidate
        self.out, self.release, self.prefetch, self.replay = (
            points_of(problem, candidate.schedule, action) for action in MOVES
        )
        wished = (value for value, decision in enumerate(candidate.wish) if decision is Decision.SWAP)
        self.swapped = (*self.release, *(value for value in wished if value not in self.release))
        """In the order of releases, followed by values without one."""
        self.use_points = problem.use_points

    def all(self) -> Iterator[Tuning]:
        problem = self.problem
        link = problem.link
        yield from self._by_rule()
        for value, decision in enumerate(self.candidate.wish):
            if decision is Decision.RECOMPUTE:
                yield from self._replays_earlier(value, self.use_points)
        for value in self.release:
            yield from self._stays(value, range(self.release[value] + 1, problem.first_use_point[value] + 1))
        for value in self.tuning.stay_until:
            yield replace(self.tuning, stay_until=_without(self.tuning.stay_until, value))
        yield from (replace(self.tuning, out_order=order) for order in _exchanges(tuple(self.out)))
        yield from (replace(self.tuning, release_order=order) for order in _exchanges(self.swapped))
        yield from (replace(self.tuning, fetch_order=order) for order in _exchanges(tuple(self.prefetch)))
        is_slowed = link.duplex < 1.0 or link.interference_out > 0.0 or link.interference_in > 0.0
        if is_slowed or not problem.launch_cost.is_compute:
            yield from self._copies_later()

    def near_waits(self) -> Iterator[Tuning]:
        """Moves that could shorten one of the longest waits."""
        yield from self._by_rule()
        waits = sorted(self.candidate.simulation.waits, key=lambda wait: (-wait.seconds, wait.point))
        for wait in waits[:WAITS]:
            if wait.is_out:  # the copy goes ahead in the queue, or another value leaves instead
                for order in _ahead(tuple(self.out), wait.value):
                    yield replace(self.tuning, out_order=order)
                yield from self._leaves_later(wait.value)
            else:
                yield from self._around_fetch(wait.value, wait.point)

    # -- moves of each kind -------------------------------------------------------------------------------------------

    def _by_rule(self) -> Iterator[Tuning]:
        """The queue of copies out in the order of releases; releases in the order in which their bytes can be freed."""
        order = tuple(sorted(self.out, key=lambda v: self.release[v]))
        if order != tuple(self.out):
            yield replace(self.tuning, out_order=order)
        problem = self.problem
        frees = {v: max(int(problem.save_tick[v]), int(problem.forward_death[v]) + 1) for v in self.swapped}
        yield replace(self.tuning, release_order=tuple(sorted(self.swapped, key=lambda v: (frees[v], v))))

    def _replays_earlier(self, value: int, points: tuple[int, ...]) -> Iterator[Tuning]:
        """A replay at each of ``points`` up to its value's use, after the others there or before them."""
        others = _without(self.tuning.replay_at, value)
        if value in self.tuning.replay_at:
            yield replace(self.tuning, replay_at=others)
        for point in points:
            if may_replay_at(self.problem, value, point):
                yield replace(self.tuning, replay_at={**others, value: point})
                if point in others.values():
                    yield replace(self.tuning, replay_at={value: point, **others})

    def _stays(self, value: int, points: range) -> Iterator[Tuning]:
        for point in points:
            yield replace(self.tuning, stay_until={**self.tuning.stay_until, value: point})

    def _copies_later(self) -> Iterator[Tuning]:
        """Copies queued later: where they slow other work, or where queueing them delays launches."""
        tuning = self.tuning
        for value, first in self.out.items():
            for point in range(first + 1, self.release[value] + 1):
                yield replace(tuning, out_from={**tuning.out_from, value: point})
        for value, first in self.prefetch.items():
            for point in self.use_points:
                if first < point <= self.problem.first_use_point[value]:
                    yield replace(tuning, fetch_from={**tuning.fetch_from, value: point})

    def _around_fetch(self, value: int, point: int) -> Iterator[Tuning]:
        """For a wait for a copy back: a replay during it, its copy ahead in the queue, or less time away."""
        tuning = self.tuning
        here = self.problem.point_index[point]
        beside = self.use_points[max(0, here - 1) : here + 1]
        for other in [other for other, at in self.replay.items() if at > point][:NEAR]:
            yield from self._replays_earlier(other, beside)
        for order in _ahead(tuple(self.prefetch), value):
            yield replace(tuning, fetch_order=order)
        yield from self._leaves_later(value)

    def _leaves_later(self, value: int) -> Iterator[Tuning]:
        """Released last, or not before one of the next points."""
        if value in self.release:
            first = self.release[value]
            yield replace(self.tuning, release_order=(*(v for v in self.swapped if v != value), value))
            yield from self._stays(value, range(first + 1, first + 1 + NEAR))


def _without(points: Mapping[int, int], value: int) -> dict[int, int]:
    return {other: point for other, point in points.items() if other != value}


def _exchanges(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every order that exchanges two."""
    for first, second in combinations(range(len(order)), 2):
        changed = list(order)
        changed[first], changed[second] = changed[second], changed[first]
        yield tuple(changed)


def _ahead(order: tuple[int, ...], value: int) -> Iterator[tuple[int, ...]]:
    """``value`` moved ahead by one place, two, four and so on."""
    place = order.index(value) if value in order else 0
    rest = [other for other in order if other != value]
    step = 1
    while step <= place:
        yield (*rest[: place - step], value, *rest[place - step :])
        step *= 2


MIN_GAIN = 1e-7
"""Smallest relative gain in step time that counts."""


def polish(problem: Problem, candidate: Candidate, budget_bytes: int, allowance: Allowance) -> Candidate:
    """The best schedule of the candidate's decisions that was met, never worse than its present one."""
    search = _Polish(problem, candidate, budget_bytes, allowance)
    for style in STYLES:
        search.attempt(style, AS_STYLED)
    while any(not search.is_done() and search.attempt(style, tuning) for style, tuning in search.moves()):
        pass  # the first move that gains is made
    return search.best


class _Polish:
    """State: the present position of the search, the best schedule so far, and the schedules tried."""

    def __init__(self, problem: Problem, candidate: Candidate, budget_bytes: int, allowance: Allowance) -> None:
        self.problem, self.budget_bytes, self.allowance = problem, budget_bytes, allowance
        self.start = self.best = candidate
        self.seen: set[object] = set()
        self.here: tuple[Style, Tuning, Candidate] | None = None
        """A requested schedule, and the result."""
        self.floor_s = least_step_s(problem, candidate.wish)

    def is_done(self) -> bool:
        best = self.best
        is_fast = best.simulation.step_s <= self.floor_s * (1 + MIN_GAIN)
        return self.allowance.is_spent or (is_fast and best.peak_bytes <= self.budget_bytes)

    def moves(self) -> Iterator[tuple[Style, Tuning]]:
        if self.here is None:
            return
        style, tuning, candidate = self.here
        moves = ScheduleMoves(self.problem, tuning, candidate)
        yield replace(style, in_order=not style.in_order), tuning
        moving = sum(decision is not Decision.KEEP for decision in candidate.wish)
        for changed in moves.all() if moving <= ALL_MOVES else moves.near_waits():
            yield style, changed

    def attempt(self, style: Style, tuning: Tuning) -> bool:
        """Fits and simulates. Returns whether the result is better than the present position."""
        points = (tuning.stay_until, tuning.out_from, tuning.fetch_from)
        orders = (tuning.out_order, tuning.release_order, tuning.fetch_order)
        key = style, tuple(tuning.replay_at.items()), tuple(tuple(sorted(one.items())) for one in points), orders
        if key in self.seen or not self.allowance.spend():
            return False
        self.seen.add(key)
        start = self.start
        found = try_style(self.problem, start.policy, start.wish, self.budget_bytes, style, tuning)
        if self._is_better(found, self.best):
            self.best = found
        if self.here is not None and not self._is_better(found, self.here[2]):
            return False
        self.here = style, tuning, found
        return True

    def _is_better(self, found: Candidate, than: Candidate) -> bool:
        found_over, found_s, _ = found.rank(self.budget_bytes)
        over, step_s, _ = than.rank(self.budget_bytes)
        return found_over < over or (found_over == over and found_s < step_s * (1 - MIN_GAIN))


def worth_polishing(
    problem: Problem, ranked: Sequence[EvaluatedPlan], budget_bytes: int, count: int, over: int
) -> list[EvaluatedPlan]:
    """Of plans, best first: up to ``count`` within the budget and ``over`` that only another schedule can bring within
    it.

    Of plans with the same resulting decisions, the one that was free to swap the most is taken.
    """
    kept: dict[bytes, EvaluatedPlan] = {}
    for found in ranked:
        same = kept.setdefault(found.decisions.tobytes(), found)
        if (found.wish == SWAP).sum() > (same.wish == SWAP).sum():
            kept[found.decisions.tobytes()] = found
    fitting = [found for found in kept.values() if found.needed_bytes <= budget_bytes]
    others = (found for found in kept.values() if found.needed_bytes > budget_bytes)
    hopeful = (found for found in others if least_peak_bytes(problem, decisions_of(found.wish)) <= budget_bytes)
    return fitting[:count] + list(islice(hopeful, over))


def least_peak_bytes(problem: Problem, wish: tuple[Decision, ...]) -> int:
    """A lower bound on the peak of all schedules of these decisions: values that are not kept are live while forward or
    a use holds them.
    """
    is_kept = np.array([decision is Decision.KEEP for decision in wish])
    size_bytes = problem.rounded_bytes
    end = np.where(is_kept, np.maximum(problem.forward_death, problem.freed), problem.forward_death)
    again = np.flatnonzero(~is_kept & (problem.first_use > problem.forward_death))
    first_use, freed = problem.first_use[again], problem.freed[again]
    live = occupancy(
        problem.tick_count,
        (problem.born, end, size_bytes),
        (first_use, np.maximum(freed, first_use), size_bytes[again]),
    )
    return int((live + problem.base_bytes).max())
