"""What may be changed about a schedule: one thing of its :class:`~poochplan.planner.schedule.style.Tuning` at a time.

A replay runs earlier and fills a wait or lets go of what it starts from; a value leaves after a replay instead of
before it; a queue goes in another order. On small steps all moves are tried, on large ones those near waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import Candidate
from poochplan.planner.problem.needs import may_replay_at
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import lists_of
from poochplan.planner.schedule.style import Tuning

ALL_MOVES = 8
"""Up to so many values that move, every move is tried."""
WAITS = 12
"""On large steps, the longest waits near which moves are tried."""
NEAR = 4
"""On large steps, how many values or points before and after a wait are tried."""


class Moves:
    """What may be changed about a schedule."""

    def __init__(self, problem: Problem, tuning: Tuning, candidate: Candidate) -> None:
        self.problem, self.tuning, self.candidate = problem, tuning, candidate
        lists = lists_of(problem, candidate.schedule)

        def points_of(action: str) -> dict[int, int]:
            return {value: point for point in sorted(lists) for value in lists[point][action]}

        self.out, self.release = points_of("swap_out"), points_of("release")
        self.prefetch, self.replay = points_of("prefetch"), points_of("replay")
        """Value -> its point, in the order in which they happen."""
        wished = (value for value, decision in enumerate(candidate.wish) if decision is Decision.SWAP)
        self.swapped = (*self.release, *(value for value in wished if value not in self.release))
        """In the order of releases, and then those that need none."""
        self.use_points = problem.use_points

    @property
    def are_few(self) -> bool:
        """Whether every move can be tried."""
        return len(self.candidate.wish) - sum(d is Decision.KEEP for d in self.candidate.wish) <= ALL_MOVES

    def all(self) -> Iterator[Tuning]:
        """Every move."""
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
        is_ahead = problem.lane is not None and not problem.lane.is_compute
        if link.duplex < 1.0 or link.interference_out > 0.0 or link.interference_in > 0.0 or is_ahead:
            yield from self._copies_later()

    def near_waits(self) -> Iterator[Tuning]:
        """Moves that could shorten one of the longest waits."""
        yield from self._by_rule()
        waits = sorted(self.candidate.simulation.waits, key=lambda wait: (-wait.seconds, wait.point))
        for wait in waits[:WAITS]:
            if wait.is_out:
                yield from self._around_release(wait.value)
            else:
                yield from self._around_fetch(wait.value, wait.point)

    # -- moves of each kind -------------------------------------------------------------------------------------------

    def _by_rule(self) -> Iterator[Tuning]:
        """The queue outwards in the order of releases; releases in the order in which bytes can be given up."""
        order = tuple(sorted(self.out, key=lambda v: self.release[v]))
        if order != tuple(self.out):
            yield replace(self.tuning, out_order=order)
        problem = self.problem
        frees = {v: max(int(problem.save_tick[v]), int(problem.forward_death[v]) + 1) for v in self.swapped}
        yield replace(self.tuning, release_order=tuple(sorted(self.swapped, key=lambda v: (frees[v], v))))

    def _replays_earlier(self, value: int, points: tuple[int, ...]) -> Iterator[Tuning]:
        """A replay at each of ``points`` up to its value's use, behind the others there or before them."""
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
        """Copies queued later: where they slow something, or where queueing them delays launches."""
        tuning = self.tuning
        for value, first in self.out.items():
            for point in range(first + 1, self.release[value] + 1):
                yield replace(tuning, out_from={**tuning.out_from, value: point})
        for value, first in self.prefetch.items():
            for point in self.use_points:
                if first < point <= self.problem.first_use_point[value]:
                    yield replace(tuning, fetch_from={**tuning.fetch_from, value: point})

    def _around_release(self, value: int) -> Iterator[Tuning]:
        """For a wait for a copy out: it goes ahead in the queue, or another value leaves in its place."""
        tuning = self.tuning
        for order in _ahead(tuple(self.out), value):
            yield replace(tuning, out_order=order)
        yield from self._leaves_later(value)

    def _around_fetch(self, value: int, point: int) -> Iterator[Tuning]:
        """For a wait for a copy back: a replay beside it, its copy ahead in the queue, or less time away."""
        tuning = self.tuning
        here = self.problem.point_index[point]
        beside = self.use_points[max(0, here - 1) : here + 1]
        for other in [other for other, at in self.replay.items() if at > point][:NEAR]:
            yield from self._replays_earlier(other, beside)
        for order in _ahead(tuple(self.prefetch), value):
            yield replace(tuning, fetch_order=order)
        yield from self._leaves_later(value)

    def _leaves_later(self, value: int) -> Iterator[Tuning]:
        """Released last of all, or not before one of the next points."""
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
