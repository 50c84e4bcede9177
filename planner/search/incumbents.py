"""The best plans so far, as several threads find them; with an arena, those whose arena fits the budget too."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from math import inf

from poochplan.formats.occupancy import Bytes
from poochplan.planner.arena.fitting import Fitting
from poochplan.planner.simulator.evaluator import STYLE_OF, SWAP, codes_of, decisions_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, try_style

KEPT = 2500
"""So many plans are remembered, those with the shortest steps; all of them where all ways to decide are tried."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """Decisions and a style, evaluated."""

    wish: Bytes
    """The decisions asked for, by their codes."""
    decisions: Bytes
    """As they turned out: what memory never asks to release is kept."""
    style: int
    step_s: float
    peak_bytes: int
    """What is live at most, in the first step too."""
    moved_bytes: int
    """Over the link, both ways."""
    origin: str
    """Where the decisions come from: a policy's name, or ``ilp`` for those of a model."""
    within_bytes: int
    """The live bytes that its schedule was made for."""
    arena_bytes: int = 0
    """Where its arena does not fit: what that takes, or seems to."""

    @property
    def needed_bytes(self) -> int:
        """What a budget must hold."""
        return max(self.peak_bytes, self.arena_bytes)

    @property
    def swapped(self) -> int:
        """How many values were free to be swapped."""
        return int((self.wish == SWAP).sum())


class Incumbents:
    """State: the plans that count; every method may be called by any thread."""

    def __init__(
        self, problem: Problem, budget_bytes: int, host_bytes: int | None, fitting: Fitting | None = None
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.host_bytes = -1 if host_bytes is None else host_bytes
        """Most bytes swapped out; -1 where there is no limit."""
        self._fitting = fitting
        self._lock = threading.Lock()
        self._plans: dict[tuple[bytes, int], EvaluatedPlan] = {}
        self._step_s = inf

    @property
    def fitting(self) -> Fitting | None:
        """What packs the best plans; None where the budget is on live bytes alone."""
        return None if self._fitting is None or self._fitting.is_hopeless else self._fitting

    @property
    def within_bytes(self) -> int:
        """Live bytes that a plan may have: the budget, less what packing adds."""
        return self.budget_bytes if self.fitting is None else self.fitting.within_bytes

    @property
    def step_s(self) -> float:
        """Seconds of the shortest step within the budget; infinite while there is none."""
        return self._step_s

    def offer(self, found: EvaluatedPlan) -> EvaluatedPlan:
        """Remembers a plan where it is among the best; one that asks for more host memory than there is, is not.

        What would be the best is packed first; it is returned with the bytes of its arena where that does not fit.
        """
        if not self._fits_host(found.decisions):
            return found
        found = self._packed(found)
        with self._lock:
            self._plans[found.wish.tobytes(), found.style] = found
            if len(self._plans) > 2 * KEPT:
                self._plans = dict(sorted(self._plans.items(), key=lambda item: self.rank(item[1]))[:KEPT])
            if found.needed_bytes <= self.budget_bytes:
                self._step_s = min(self._step_s, found.step_s)
        return found

    def _packed(self, found: EvaluatedPlan) -> EvaluatedPlan:
        """With what its arena takes, or seems to, where that is above the budget."""
        fitting = self.fitting
        if fitting is None or found.peak_bytes > self.budget_bytes or found.step_s >= self._step_s:
            return found
        over_bytes = found.peak_bytes - fitting.within_bytes
        needed_bytes = self.budget_bytes + over_bytes if over_bytes > 0 else fitting.pack(self.simulated(found))
        return replace(found, arena_bytes=needed_bytes) if needed_bytes > self.budget_bytes else found

    def ranked(self) -> list[EvaluatedPlan]:
        """The best first: by what a budget must hold, or by live bytes alone where no arena fits."""
        is_live = self.fitting is None
        with self._lock:
            plans = [replace(found, arena_bytes=0) if is_live else found for found in self._plans.values()]
        return sorted(plans, key=self.rank)

    def best(self, *, is_live: bool = False) -> EvaluatedPlan:
        """The one with the shortest step within the budget, else with the fewest bytes over it.

        ``is_live``: the budget is on live bytes alone, as where the search ended without an arena that fits.
        """
        with self._lock:
            plans = [replace(found, arena_bytes=0) if is_live else found for found in self._plans.values()]
        return min(plans, key=self.rank)

    def simulated(self, found: EvaluatedPlan) -> Candidate:
        """The same plan with its schedule, by the simulator."""
        wish = decisions_of(found.wish)
        return try_style(self.problem, found.origin, wish, found.within_bytes, STYLE_OF[found.style])

    def fits(self, candidate: Candidate) -> bool:
        """Whether the host has room for what a plan swaps."""
        return self._fits_host(codes_of(candidate.schedule.decisions))

    def _fits_host(self, decisions: Bytes) -> bool:
        return self.host_bytes < 0 or int(self.problem.size_bytes[decisions == SWAP].sum()) <= self.host_bytes

    def rank(self, found: EvaluatedPlan) -> tuple[int, float, bool, int, bytes]:
        """Smaller is better. Between plans that are equal to a millionth of the step the model's own is taken."""
        over_bytes = max(0, found.needed_bytes - self.budget_bytes)
        step = round(found.step_s / self.problem.step_s * 1e6) if self.problem.step_s > 0 else 0
        return over_bytes, step, found.origin != "ilp", found.moved_bytes, found.wish.tobytes()
