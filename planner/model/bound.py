"""The proven lower bound on the step time of every plan: the relaxation BOUND, first as LP, then as MIP.

Proven for every plan that follows ``docs/semantics.md`` and releases a value, if at all, before its first use; the
argument, row by row, is in ``docs/planner.md``.
"""

from __future__ import annotations

import time
from dataclasses import replace

from poochplan.planner.allowance import EVALUATIONS_PER_SOLVE, Allowance
from poochplan.planner.judge.candidate import movable
from poochplan.planner.problem.problem import Problem
from poochplan.planner.rows.whole_rows import large_values

from .branching import Branching, Place, values_to_branch_on
from .relaxation import Relaxation, bound_model, bound_seconds
from .solvers import Cancel, Limits, SolverStatus, solve_linear

INTEGRAL_SHARE = 0.0005
"""Values that are less than this share of the saved bytes stay fractional in the MIP: it only relaxes."""
INTEGRAL_GAP = 2e-4
"""The MIP stops when it is solved to this share of the step."""
LARGE_SHARE = 0.02
"""Values of more than this share of the saved bytes move in one piece in the MIP."""
GRID = 60
"""Slots at which the MIP counts these."""
SAFETY = 1e-6
"""Share of the step that is taken off the MIP's dual bound for the solver's tolerances; the LP's needs none."""


def lower_bound(problem: Problem, budget_bytes: int, solver: str, limits: Limits) -> float:
    """Seconds: the bound of the LP for ``budget_bytes``; the step that keeps all where nothing is proven in time.

    The duals are checked, not trusted: see :func:`~.linear.proven_bound`.
    """
    started_s = time.perf_counter()
    model = bound_model(problem, budget_bytes)
    found = solve_linear(model.linear.arrays(), solver, limits.since(started_s), relaxed=True)
    return bound_seconds(model, found.bound)


def integral_bound(
    problem: Problem, budget_bytes: int, solver: str, limits: Limits, cancel: Cancel | None = None
) -> float:
    """Seconds: the dual bound of the MIP, which lies between the LP's bound and the optimum.

    First all copies are fluid. Where that is solved in time, large values move in one piece besides, which is slower.
    """
    started_s = time.perf_counter()
    fluid_s, status = _integral(problem, budget_bytes, solver, limits, cancel, ())
    large = large_values(problem, movable(problem), LARGE_SHARE)
    if status is not SolverStatus.OPTIMAL or not large or (cancel is not None and cancel.is_set):
        return fluid_s
    rest = limits.since(started_s)
    return max(fluid_s, _integral(problem, budget_bytes, solver, rest, cancel, large)[0])


def _integral(
    problem: Problem, budget_bytes: int, solver: str, limits: Limits, cancel: Cancel | None, whole: tuple[int, ...]
) -> tuple[float, SolverStatus]:
    """Seconds that the MIP proves, and how it ended."""
    started_s = time.perf_counter()
    model = bound_model(problem, budget_bytes, whole=whole, grid=GRID)
    small = INTEGRAL_SHARE * model.all_bytes
    for columns in (model.swap, model.recompute):
        for value, column in columns.items():
            if model.resident[value] < small:
                model.linear.is_integer[column] = False
    absolute_gap = INTEGRAL_GAP * problem.step_s / model.time_unit_s
    scaled = replace(limits.since(started_s), gap=INTEGRAL_GAP, absolute_gap=absolute_gap)
    found = solve_linear(model.linear.arrays(), solver, scaled, cancel=cancel)
    proven_s = bound_seconds(model, found.bound) - SAFETY * problem.step_s
    return max(problem.keep_all_s, proven_s), found.status


class Proof:
    """State: the best bound proven so far. One thread proves, any thread asks, and any may end it."""

    def __init__(self, problem: Problem, budget_bytes: int, solver: str) -> None:
        self._problem, self._budget_bytes, self._solver = problem, budget_bytes, solver
        self._cancel = Cancel()
        self._branching: Branching | None = None
        self._until: Allowance | None = None
        self._bound_s = problem.keep_all_s

    @property
    def bound_s(self) -> float:
        """No plan within the budget has a shorter step, unless one was found that is as short as this."""
        return self._bound_s

    @property
    def is_late(self) -> bool:
        """Whether the MIP runs on although its time is over: HiGHS does not always look at the clock."""
        return self._until is not None and self._until.is_spent

    def begin(self, allowance: Allowance) -> None:
        """The bound of the LP."""
        if self._solver != "highs":  # it is given the LP, and not kept for another
            self._raise_to(lower_bound(self._problem, self._budget_bytes, self._solver, allowance.limits()))
            return
        large = values_to_branch_on(self._problem, movable(self._problem))
        relaxation = Relaxation(self._problem, self._budget_bytes, self._cancel, is_solved_again=bool(large))
        self._branching = Branching(relaxation, large if relaxation.is_solved_again else ())
        self._branching.begin(allowance)
        self._raise_to(self._branching.bound_s)

    def branch(self, allowance: Allowance, solves: int, enough_s: float) -> list[Place]:
        """Decides the largest values each way there is, in about so many LPs, none of them for more than ``enough_s``;
        where to look for plans then."""
        branching = self._branching
        if branching is None or not branching.large:
            return []
        while branching.solved < solves and not allowance.is_spent and not self._cancel.is_set:
            allowance.spend(EVALUATIONS_PER_SOLVE)
            if not branching.step(allowance, enough_s):
                break
        self._raise_to(min(branching.bound_s, enough_s))
        return branching.places()

    def integral(self, allowance: Allowance) -> None:
        """The bound of the MIP; only HiGHS tells one before it is done."""
        if self._solver == "highs" and not self._cancel.is_set:
            self._until = allowance
            self._raise_to(
                integral_bound(self._problem, self._budget_bytes, self._solver, allowance.limits(), self._cancel)
            )

    def end(self) -> None:
        """Ends what is running, and whatever is still to come."""
        self._cancel.set()

    def _raise_to(self, bound_s: float) -> None:
        self._bound_s = max(self._bound_s, bound_s)
