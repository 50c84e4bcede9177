"""The policy ``ilp``: the fluid model proposes, the simulator judges, local search improves, a bound proves.

Each stage ends early when the step is within the wanted gap of the proven bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import (
    STYLES,
    Candidate,
    least_step_s,
    movable,
    swap_all_on_demand,
    try_decisions,
    try_style,
)
from poochplan.planner.model.bound import Proof
from poochplan.planner.model.decide import Solution, solve_fluid
from poochplan.planner.model.fluid import Request
from poochplan.planner.model.solvers import Limits, choose_solver
from poochplan.planner.model.whole_rows import large_values
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import with_recording

from .annealing import anneal
from .descent import Budget, descend
from .polish import polish, worth_polishing
from .starts import simple_plans

TINY_SHARE = 0.005
"""Values that together hold less than this share of the saved bytes are kept, where the budget has room for them."""
MARGINS = (0.0, 1.0, 0.5)
"""What the relaxation is not given of the budget, one after another, in units of the largest value that may move."""
BRANCHES_FIRST = 64
"""With no more values than this, the model with integrality is solved before the walk."""
NO_GAP = 1e-6
"""A plan as near to the bound as this cannot be improved on by another policy's."""
SOLVER_GAP = 0.005
ABSOLUTE_GAP = 5e-4
"""The solver also stops at this share of the step."""
LARGE_SHARE = 0.01
"""Values of more than this share of the saved bytes move in one piece in the model with integrality."""
GRID = 30
"""Slots at which they do."""
STARTS = 3
"""How many of the best plans local search starts from."""
HOTTEST, COLDEST_START = 0.003, 1e-4
"""Temperatures, as shares of the step, between which annealing begins."""
EVALUATIONS = 4000
EVALUATIONS_PER_VALUE = 30
"""Simulations that each local search may take: so many, or so many per value, whichever is less."""
POLISHED = 8
POLISHED_OF_ALL = 30
"""The schedules of so many of the best plans are polished; of more where all ways to decide were tried."""
POLISH_EVALUATIONS = 500
POLISH_SHARE = 0.1
"""Share of the time limit that polishing may take beyond it."""
EXHAUSTIVE = 800
"""Where there are no more ways to decide than this, all of them are tried."""


@dataclass(frozen=True)
class Effort:
    """How long to search, and when to stop."""

    solver: str | None = None
    time_limit_s: float = 60.0
    gap: float = 0.005
    """The search ends when the step is within this share of the proven bound."""
    threads: int = 2
    host_bytes: int | None = None


@dataclass(frozen=True)
class Optimum:
    """What came out of the search for one budget."""

    best: Candidate
    """Over the budget only where no plan within the host's memory was found."""
    solution: Solution | None
    """Of the model for the full budget that decided last."""
    bound_s: float
    """No plan within the budget has a shorter step."""
    status: str
    """``within gap``, ``time limit``, or ``searched``: the search came to its end without either."""
    rounds: int
    tiny: frozenset[int]


def optimise(
    problem: Problem, budget_bytes: int, effort: Effort, proposals: Sequence[Callable[[], Candidate]] = ()
) -> Optimum:
    """The plan with the least simulated step that was found; ``proposals`` are other policies to ask for theirs."""
    search = _Search(problem, budget_bytes, effort, proposals)
    try:
        search.consider(simple_plans(problem, budget_bytes))
        search.compare()
        for stage in search.stages():
            if search.is_over:
                break
            stage()
        search.polish()
        return search.optimum()
    finally:
        search.proof.end()


class _Search:
    """State: the plans tried so far, the last solution, and the proof that runs beside."""

    def __init__(
        self, problem: Problem, budget_bytes: int, effort: Effort, proposals: Sequence[Callable[[], Candidate]]
    ) -> None:
        self.proposals = proposals
        self.problem, self.budget_bytes, self.effort = problem, budget_bytes, effort
        self.solver = choose_solver(effort.solver)
        self.deadline_s = time.perf_counter() + effort.time_limit_s
        self.tiny = _tiny(problem, budget_bytes)
        self.candidates = tuple(value for value in movable(problem) if value not in self.tiny)
        self.proof = Proof(problem, budget_bytes, self.solver, self.deadline_s, threaded=effort.threads > 1)
        kept = (Decision.KEEP,) * problem.value_count
        self.tried = [try_style(problem, "keep-all", kept, budget_bytes, STYLES[0])]
        self.solution: Solution | None = None
        self.rounds = self.walks = 0
        self.is_exhausted = False

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def consider(self, found: Iterable[Candidate]) -> None:
        """Adds plans to those tried; one that asks for more host memory than there is does not count."""
        self.tried += [candidate for candidate in found if self._fits_host(candidate)]

    def _fits_host(self, candidate: Candidate) -> bool:
        if self.effort.host_bytes is None:
            return True
        decisions = candidate.schedule.decisions
        swapped = [value for value, decision in enumerate(decisions) if decision is Decision.SWAP]
        return int(self.problem.size_bytes[swapped].sum()) <= self.effort.host_bytes

    @property
    def best(self) -> Candidate:
        return min(self.tried, key=self._rank)

    def _rank(self, candidate: Candidate) -> tuple[int, int, bool, int]:
        """As :meth:`Candidate.rank`, but between plans equal to a millionth of the step the ILP's is taken."""
        over, step_s, moved = candidate.rank(self.budget_bytes)
        step = round(step_s / self.problem.step_s * 1e6) if self.problem.step_s > 0 else 0
        return over, step, candidate.policy != "ilp", moved

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.perf_counter()

    def _gap(self) -> float:
        """Of the best plan to the bound proven so far; infinite while it is over the budget."""
        return self._gap_of(self.best) if self.best.peak_bytes <= self.budget_bytes else inf

    def _gap_of(self, candidate: Candidate) -> float:
        bound_s = self.proof.linear_s
        return candidate.simulation.step_s / bound_s - 1 if bound_s > 0 else 0.0

    @property
    def is_good_enough(self) -> bool:
        return self._gap() <= self.effort.gap

    @property
    def is_over(self) -> bool:
        return self.is_exhausted or self.left_s <= 0 or self.is_good_enough

    def _starts(self) -> list[Candidate]:
        kept: dict[tuple[Decision, ...], Candidate] = {}
        for candidate in sorted(self.tried, key=self._rank):
            kept.setdefault(candidate.schedule.decisions, candidate)
        return list(kept.values())[:STARTS]

    def optimum(self) -> Optimum:
        """The best plan, with recording, and what is proven."""
        best = replace(self.best, schedule=with_recording(self.problem, self.best.schedule))
        is_late = self.left_s <= 0
        bound_s = self.proof.finish(is_enough=self.is_good_enough)
        is_near = best.simulation.step_s <= bound_s * (1 + self.effort.gap) and best.peak_bytes <= self.budget_bytes
        status = "within gap" if is_near else "time limit" if is_late else "searched"
        return Optimum(best, self.solution, bound_s, status, self.rounds, self.tiny)

    def stages(self) -> tuple[Callable[[], None], ...]:
        """What to do, one after another, until the search is over; the schedules are polished in any case."""
        if len(self.candidates) <= BRANCHES_FIRST:
            return self.try_all, self.relax, self.branch, self.walk, self.walk
        return self.try_all, self.relax, self.walk, self.branch, self.walk

    # -- stages -------------------------------------------------------------------------------------------------------

    def try_all(self) -> None:
        """Every way to decide, where there are few."""
        choices = [_choices(self.problem, value) for value in range(self.problem.value_count)]
        count = int(np.prod([float(len(choice)) for choice in choices]))
        self.is_exhausted = count <= EXHAUSTIVE
        if self.is_exhausted:
            self.consider(
                try_style(self.problem, "ilp", wish, self.budget_bytes, style)
                for wish in product(*choices)
                for style in STYLES
            )

    def relax(self) -> None:
        """Solves the relaxation, rounds it and descends; again for less memory, since whole buffers need more room."""
        largest = max((int(self.problem.rounded_bytes[value]) for value in self.candidates), default=0)
        for margin in MARGINS:
            request = replace(self._request(), budget_bytes=int(self.budget_bytes - margin * largest))
            found = self._solve(request, relaxed=True)
            if found is not None:
                self.consider([self._descend(found, share=0.15)])
            if self.is_over:
                return

    def branch(self) -> None:
        """Solves the model with its integrality, large values moving in one piece, from the best decisions so far."""
        large = large_values(self.problem, self.candidates, LARGE_SHARE)
        request = replace(self._request(), whole=large, grid=GRID)
        found = self._solve(request, limit_s=self.left_s * 0.35, start=self.best.wish)
        if found is not None and not self.is_over:
            self.consider([self._descend(found, share=0.15)])

    def compare(self) -> None:
        """The plans of other policies, so that none of them is better."""
        for propose in self.proposals:
            if self.left_s > 0 and not self.is_exhausted and self._gap() > NO_GAP:
                self.consider([propose()])

    def walk(self) -> None:
        """Local search that also takes changes for the worse, from the best plans, as warm as the gap is wide."""
        for start in self._starts():
            if self.is_over:
                return
            self._anneal(start, seed=self.walks)
            self.walks += 1

    def polish(self) -> None:
        """Local search over the schedules of the best decisions: of more where all were tried."""
        deadline_s = time.perf_counter() + max(1.0, POLISH_SHARE * self.effort.time_limit_s)
        ranked = sorted(self.tried, key=self._rank)
        count, over = (POLISHED_OF_ALL, POLISHED_OF_ALL) if self.is_exhausted else (POLISHED, 0)
        for start in worth_polishing(self.problem, ranked, self.budget_bytes, count, over):
            if self.is_good_enough or time.perf_counter() > deadline_s:
                return
            if least_step_s(self.problem, start.wish) < self.best.simulation.step_s:
                budget = Budget(POLISH_EVALUATIONS, deadline_s)
                self.consider([polish(self.problem, start, self.budget_bytes, budget)])

    # -- steps --------------------------------------------------------------------------------------------------------

    def _request(self) -> Request:
        return Request(self.budget_bytes, self.candidates, host_bytes=self.effort.host_bytes)

    def _solve(
        self,
        request: Request,
        *,
        relaxed: bool = False,
        limit_s: float | None = None,
        start: tuple[Decision, ...] | None = None,
    ) -> Candidate | None:
        limits = Limits(
            time_s=max(0.5, self.left_s if limit_s is None else limit_s),
            gap=SOLVER_GAP,
            absolute_gap=ABSOLUTE_GAP * self.problem.step_s,
        )
        solution = solve_fluid(self.problem, request, self.solver, limits, relaxed=relaxed, start=start)
        self.rounds += 1
        if self.solution is None or (solution.decisions is not None and request.budget_bytes == self.budget_bytes):
            self.solution = solution
        if solution.decisions is None:
            return None
        found = try_decisions(self.problem, "ilp", solution.decisions, self.budget_bytes)
        self.consider([found])
        return found

    def _descend(self, start: Candidate, *, share: float) -> Candidate:
        budget = Budget(self._evaluations(), time.perf_counter() + self.left_s * share)
        return descend(self.problem, start, self.budget_bytes, self.candidates, budget)

    def _anneal(self, start: Candidate, *, seed: int) -> None:
        budget = Budget(self._evaluations(), self.deadline_s)
        warm = min(HOTTEST, max(COLDEST_START, 0.3 * self._gap_of(start)))
        met = anneal(self.problem, start, self.budget_bytes, self.candidates, budget, temperature=warm, seed=seed)
        self.consider([met, self._descend(met, share=1.0)])

    def _evaluations(self) -> int:
        return min(EVALUATIONS, EVALUATIONS_PER_VALUE * len(self.candidates))


def _choices(problem: Problem, value: int) -> tuple[Decision, ...]:
    if problem.must_keep[value]:
        return (Decision.KEEP,)
    if problem.replay.replays[value] is None:
        return Decision.KEEP, Decision.SWAP
    return tuple(Decision)


def _tiny(problem: Problem, budget_bytes: int) -> frozenset[int]:
    """Values too small to matter; none when the budget has no room for them."""
    total = int(problem.rounded_bytes.sum())
    tiny: set[int] = set()
    held = 0
    for value in sorted(movable(problem), key=lambda v: (int(problem.rounded_bytes[v]), v)):
        held += int(problem.rounded_bytes[value])
        if held > total * TINY_SHARE:
            break
        tiny.add(value)
    floor = swap_all_on_demand(problem).peak_bytes + held
    return frozenset(tiny) if floor <= budget_bytes else frozenset()
