"""The policy ``ilp``: the fluid model proposes, the simulator judges, local search improves, a bound proves.

Each stage ends early when the step is within the wanted gap of the proven bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, SolveStatus
from poochplan.planner.allowance import Allowance, CountAllowance, TimeAllowance
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
from poochplan.planner.model.solvers import choose_solver
from poochplan.planner.problem.problem import Problem
from poochplan.planner.rows.whole_rows import large_values
from poochplan.planner.schedule.schedule import with_recording

from .annealing import anneal
from .descent import descend
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
WALKS = 2 * STARTS
"""How many walks one search takes at most, each with a seed of its own."""
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
"""Share of the time limit, or of the simulations, that polishing may take beyond it."""
POLISH_LEAST_S = 1.0
PROPOSAL_EVALUATIONS = 500
"""Where simulations are counted, another policy is asked for its plan if this many are left: it takes about as many of
its own."""
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
    evaluations: int | None = None
    """Simulations that local search may take, in place of the time limit: the plan is then a pure function of profile,
    budget and effort, however long it takes."""
    seed: int = 0
    """Of the random walks."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"seed: expected at least 0, found {self.seed}")
        if self.evaluations is None:
            return
        if self.evaluations < 1:
            raise UsageError(f"evaluations: expected at least 1, found {self.evaluations}")
        if self.threads > 1:
            raise UsageError(
                f"threads: expected 1 with evaluations, found {self.threads}: what a second thread proves in time "
                "depends on the machine; leave threads out, or evaluations"
            )

    def allowance(self) -> Allowance:
        """What the search may spend, from now on."""
        return TimeAllowance(self.time_limit_s) if self.evaluations is None else CountAllowance(self.evaluations)


@dataclass(frozen=True)
class Optimum:
    """What came out of the search for one budget."""

    best: Candidate
    """Over the budget only where no plan within the host's memory was found."""
    solution: Solution | None
    """Of the model for the full budget that decided last."""
    bound_s: float
    """No plan within the budget has a shorter step."""
    status: SolveStatus
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
        self.solver = _solver_for(effort)
        self.allowance = effort.allowance()
        self.tiny = _tiny(problem, budget_bytes)
        self.candidates = tuple(value for value in movable(problem) if value not in self.tiny)
        self.proof = Proof(problem, budget_bytes, self.solver, self.allowance, threaded=effort.threads > 1)
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
        return self.is_exhausted or self.allowance.is_spent or self.is_good_enough

    def _starts(self) -> list[Candidate]:
        kept: dict[tuple[Decision, ...], Candidate] = {}
        for candidate in sorted(self.tried, key=self._rank):
            kept.setdefault(candidate.schedule.decisions, candidate)
        return list(kept.values())[:STARTS]

    def optimum(self) -> Optimum:
        """The best plan, with recording, and what is proven."""
        best = replace(self.best, schedule=with_recording(self.problem, self.best.schedule))
        status = self.allowance.status  # before the proof is waited for
        bound_s = self.proof.finish(is_enough=self.is_good_enough)
        is_near = best.simulation.step_s <= bound_s * (1 + self.effort.gap) and best.peak_bytes <= self.budget_bytes
        return Optimum(
            best, self.solution, bound_s, SolveStatus.WITHIN_GAP if is_near else status, self.rounds, self.tiny
        )

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
        found = self._solve(request, share=0.35, start=self.best.wish)
        if found is not None and not self.is_over:
            self.consider([self._descend(found, share=0.15)])

    def compare(self) -> None:
        """The plans of other policies, so that none of them is better."""
        for propose in self.proposals:
            if self.allowance.affords(PROPOSAL_EVALUATIONS) and not self.is_exhausted and self._gap() > NO_GAP:
                self.consider([propose()])

    def walk(self) -> None:
        """Local search that also takes changes for the worse, from the best plans, as warm as the gap is wide."""
        for start in self._starts():
            if self.is_over:
                return
            self._anneal(start, seed=self.effort.seed * WALKS + self.walks)
            self.walks += 1

    def polish(self) -> None:
        """Local search over the schedules of the best decisions: of more where all were tried."""
        allowance = self.allowance.part(POLISH_SHARE, POLISH_LEAST_S)
        ranked = sorted(self.tried, key=self._rank)
        count, over = (POLISHED_OF_ALL, POLISHED_OF_ALL) if self.is_exhausted else (POLISHED, 0)
        for start in worth_polishing(self.problem, ranked, self.budget_bytes, count, over):
            if self.is_good_enough or allowance.is_spent:
                return
            if least_step_s(self.problem, start.wish) < self.best.simulation.step_s:
                budget = allowance.stage(POLISH_EVALUATIONS)
                self.consider([polish(self.problem, start, self.budget_bytes, budget)])

    # -- steps --------------------------------------------------------------------------------------------------------

    def _request(self) -> Request:
        return Request(self.budget_bytes, self.candidates, host_bytes=self.effort.host_bytes)

    def _solve(
        self,
        request: Request,
        *,
        relaxed: bool = False,
        share: float = 1.0,
        start: tuple[Decision, ...] | None = None,
    ) -> Candidate | None:
        limits = self.allowance.limits(share, gap=SOLVER_GAP, absolute_gap=ABSOLUTE_GAP * self.problem.step_s)
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
        budget = self.allowance.stage(self._evaluations(), share)
        return descend(self.problem, start, self.budget_bytes, self.candidates, budget)

    def _anneal(self, start: Candidate, *, seed: int) -> None:
        budget = self.allowance.stage(self._evaluations())
        warm = min(HOTTEST, max(COLDEST_START, 0.3 * self._gap_of(start)))
        met = anneal(self.problem, start, self.budget_bytes, self.candidates, budget, temperature=warm, seed=seed)
        self.consider([met, self._descend(met, share=1.0)])

    def _evaluations(self) -> int:
        return min(EVALUATIONS, EVALUATIONS_PER_VALUE * len(self.candidates))


def _solver_for(effort: Effort) -> str:
    """The solver asked for; where simulations are counted, one whose work can be counted too."""
    solver = choose_solver(effort.solver)
    if effort.evaluations is not None and solver != "highs":
        raise UsageError(
            f"solver: expected highs with evaluations, found {solver!r}, which only time can stop; "
            "pip install highspy and leave the solver out, or leave evaluations out"
        )
    return solver


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
