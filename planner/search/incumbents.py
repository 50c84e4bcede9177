"""The best plans so far, found by several threads. With an arena, only plans whose arena fits the budget count."""

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
"""This many plans with the shortest steps are remembered; all of them if all ways to decide are tried."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """Decisions and a style, evaluated."""

    wish: Bytes
    """The requested decisions, by their codes."""
    decisions: Bytes
    """The resulting decisions: a value that memory never requires to be released is kept."""
    style: int
    step_s: float
    peak_bytes: int
    """Most live bytes, including in the first step."""
    moved_bytes: int
    """Bytes over the link, both ways."""
    origin: str
    """Source of the decisions: a policy's name, or ``ilp`` for those of a model."""
    within_bytes: int
    """The live bytes for which its schedule was made."""
    arena_bytes: int = 0
    """If its arena does not fit: the bytes that the arena takes, or is estimated to take."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that a budget must hold."""
        return max(self.peak_bytes, self.arena_bytes)

    @property
    def swapped(self) -> int:
        """Number of values that were free to be swapped."""
        return int((self.wish == SWAP).sum())


class Incumbents:
    """State: the plans that count. Every method may be called by any thread."""

    def __init__(
        self, problem: Problem, budget_bytes: int, host_bytes: int | None, fitting: Fitting | None = None
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.host_bytes = -1 if host_bytes is None else host_bytes
        """Most bytes swapped out; -1 if there is no limit."""
        self._fitting = fitting
        self._lock = threading.Lock()
        self._plans: dict[tuple[bytes, int], EvaluatedPlan] = {}
        self.step_s = inf
        """Seconds of the shortest step within the budget; infinite if there is none."""

    @property
    def fitting(self) -> Fitting | None:
        """Packs the best plans; None if the budget covers live bytes alone."""
        return None if self._fitting is None or self._fitting.is_hopeless else self._fitting

    @property
    def within_bytes(self) -> int:
        """Live bytes that a plan may have: the budget minus the bytes that packing adds."""
        return self.budget_bytes if self.fitting is None else self.fitting.within_bytes

    def offer(self, found: EvaluatedPlan) -> EvaluatedPlan:
        """Remembers a plan if it is among the best. A plan that needs more host memory than there is never is.

        A plan that would be the best one is packed first. It is returned with the bytes of its arena if that does not
        fit.
        """
        if not self._fits_host(found.decisions):
            return found
        found = self._packed(found)
        with self._lock:
            self._plans[found.wish.tobytes(), found.style] = found
            if len(self._plans) > 2 * KEPT:
                self._plans = dict(sorted(self._plans.items(), key=lambda item: self.rank(item[1]))[:KEPT])
            if found.needed_bytes <= self.budget_bytes:
                self.step_s = min(self.step_s, found.step_s)
        return found

    def _packed(self, found: EvaluatedPlan) -> EvaluatedPlan:
        """The plan with the bytes that its arena takes, or is estimated to take, if these exceed the budget."""
        fitting = self.fitting
        if fitting is None or found.peak_bytes > self.budget_bytes or found.step_s >= self.step_s:
            return found
        over_bytes = found.peak_bytes - fitting.within_bytes
        needed_bytes = self.budget_bytes + over_bytes if over_bytes > 0 else fitting.pack(self.simulated(found))
        return replace(found, arena_bytes=needed_bytes) if needed_bytes > self.budget_bytes else found

    def ranked(self) -> list[EvaluatedPlan]:
        """The best plan first: by the bytes that a budget must hold, or by live bytes alone if no arena fits."""
        is_live = self.fitting is None
        with self._lock:
            plans = [replace(found, arena_bytes=0) if is_live else found for found in self._plans.values()]
        return sorted(plans, key=self.rank)

    def best(self, *, is_live: bool = False) -> EvaluatedPlan:
        """The plan with the shortest step within the budget, else that with the fewest bytes above it.

        ``is_live``: the budget covers live bytes alone, for example because the search ended without an arena that
        fits.
        """
        with self._lock:
            plans = [replace(found, arena_bytes=0) if is_live else found for found in self._plans.values()]
        return min(plans, key=self.rank)

    def simulated(self, found: EvaluatedPlan) -> Candidate:
        """The same plan with its schedule, by the simulator."""
        wish = decisions_of(found.wish)
        return try_style(self.problem, found.origin, wish, found.within_bytes, STYLE_OF[found.style])

    def fits(self, candidate: Candidate) -> bool:
        """Whether the host has room for the values that a plan swaps."""
        return self._fits_host(codes_of(candidate.schedule.decisions))

    def _fits_host(self, decisions: Bytes) -> bool:
        return self.host_bytes < 0 or int(self.problem.size_bytes[decisions == SWAP].sum()) <= self.host_bytes

    def rank(self, found: EvaluatedPlan) -> tuple[int, float, bool, int, bytes]:
        """A smaller rank is better. Among plans that are equal to a millionth of the step, that of the model itself is
        preferred.
        """
        over_bytes = max(0, found.needed_bytes - self.budget_bytes)
        step = round(found.step_s / self.problem.step_s * 1e6) if self.problem.step_s > 0 else 0
        return over_bytes, step, found.origin != "ilp", found.moved_bytes, found.wish.tobytes()
