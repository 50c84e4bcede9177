"""Local search over the schedule of given decisions: the simulator says where the step waits, and what it helps.

``moves.py`` says what may change. After each move the schedule is fitted again, so that memory stays within the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import Decision
from poochplan.planner.allowance import Budget
from poochplan.planner.evaluator.codes import decisions_of
from poochplan.planner.judge.candidate import STYLES, Candidate, least_step_s, try_style
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import with_recording
from poochplan.planner.schedule.style import AS_STYLED, Style, Tuning
from poochplan.planner.walks.incumbents import Found

from .moves import Moves

MIN_GAIN = 1e-7
"""Smallest relative gain in step time that counts."""


def polish(problem: Problem, candidate: Candidate, budget_bytes: int, budget: Budget) -> Candidate:
    """The best schedule met of the candidate's decisions, never worse than the one it has; with recording."""
    search = _Search(problem, candidate, budget_bytes, budget)
    search.run()
    best = search.best
    return replace(best, schedule=with_recording(problem, best.schedule))


@dataclass(frozen=True, eq=False)
class _State:
    """A schedule as it is asked for, and as it turned out."""

    style: Style
    tuning: Tuning
    candidate: Candidate


class _Search:
    """State: where the search is, the best schedule so far, and what was tried."""

    def __init__(self, problem: Problem, candidate: Candidate, budget_bytes: int, budget: Budget) -> None:
        self.problem, self.budget_bytes, self.budget = problem, budget_bytes, budget
        self.start = self.best = candidate
        self.seen: set[object] = set()
        self.here: _State | None = None
        self.floor_s = least_step_s(problem, candidate.wish)

    def run(self) -> None:
        """First the plain styles, then moves until none gains."""
        for style in STYLES:
            self._try(style, AS_STYLED)
        while self.here is not None and self._step(self.here):
            pass

    def _step(self, here: _State) -> bool:
        """The first move that gains; whether there is one."""
        return any(not self._is_done() and self._try(style, tuning) for style, tuning in self._moves(here))

    def _is_done(self) -> bool:
        best = self.best
        is_fast = best.simulation.step_s <= self.floor_s * (1 + MIN_GAIN)
        return self.budget.left <= 0 or (is_fast and best.peak_bytes <= self.budget_bytes)

    def _moves(self, here: _State) -> Iterator[tuple[Style, Tuning]]:
        moves = Moves(self.problem, here.tuning, here.candidate)
        yield replace(here.style, in_order=not here.style.in_order), here.tuning
        for tuning in moves.all() if moves.are_few else moves.near_waits():
            yield here.style, tuning

    def _try(self, style: Style, tuning: Tuning) -> bool:
        """Fits and simulates; whether it is better than where the search is."""
        key = style, _key(tuning)
        if key in self.seen or not self.budget.spend():
            return False
        self.seen.add(key)
        start = self.start
        found = try_style(self.problem, start.policy, start.wish, self.budget_bytes, style, tuning, recorded=False)
        if self._is_better(found, self.best):
            self.best = found
        if self.here is not None and not self._is_better(found, self.here.candidate):
            return False
        self.here = _State(style, tuning, found)
        return True

    def _is_better(self, found: Candidate, than: Candidate) -> bool:
        found_over, found_s, _ = found.rank(self.budget_bytes)
        over, step_s, _ = than.rank(self.budget_bytes)
        return found_over < over or (found_over == over and found_s < step_s * (1 - MIN_GAIN))


def worth_polishing(problem: Problem, ranked: Sequence[Found], budget_bytes: int, count: int, over: int) -> list[Found]:
    """Of plans, best first: up to ``count`` within the budget and ``over`` that only another schedule can bring there.

    Of those that ended with the same decisions, the one that was free to swap the most.
    """
    kept: dict[bytes, Found] = {}
    for found in ranked:
        key = found.decisions.tobytes()
        if key not in kept or found.swapped > kept[key].swapped:
            kept[key] = found
    fitting = [found for found in kept.values() if found.needed_bytes <= budget_bytes]
    others = (found for found in kept.values() if found.needed_bytes > budget_bytes)
    hopeful = (found for found in others if least_peak_bytes(problem, decisions_of(found.wish)) <= budget_bytes)
    return fitting[:count] + list(islice(hopeful, over))


def least_peak_bytes(problem: Problem, wish: tuple[Decision, ...]) -> int:
    """A peak that no schedule of these decisions is below: what is not kept is live while forward or a use holds it."""
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


def _key(tuning: Tuning) -> object:
    points = (tuning.stay_until, tuning.out_from, tuning.fetch_from)
    orders = (tuning.out_order, tuning.release_order, tuning.fetch_order)
    return tuple(tuning.replay_at.items()), tuple(tuple(sorted(one.items())) for one in points), orders
