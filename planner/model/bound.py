"""The proven lower bound on the step time of every plan: the relaxation BOUND, first as LP, then as MIP.

Proven for every plan that follows ``docs/semantics.md`` and releases a value, if at all, before its first use; the
argument, row by row, is in ``docs/planner.md``.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from poochplan.planner.allowance import Allowance
from poochplan.planner.judge.candidate import movable
from poochplan.planner.problem.problem import Problem
from poochplan.planner.rows.whole_rows import large_values

from .relaxation import bound_model, bound_seconds
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
    """State: the best bound proven so far, while the plan is searched for.

    With a thread of its own the MIP runs beside the search (the solver lets go of the interpreter); without, only the
    LP is solved.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, solver: str, allowance: Allowance, *, threaded: bool
    ) -> None:
        self._problem, self._budget_bytes, self._solver, self._allowance = problem, budget_bytes, solver, allowance
        self._cancel = Cancel()
        self._error: BaseException | None = None
        self.linear_s = lower_bound(problem, budget_bytes, solver, allowance.limits())
        self._integral_s = 0.0
        is_beside = threaded and solver == "highs"  # PuLP tells no dual bound
        self._thread = threading.Thread(target=self._run, name="bound", daemon=True) if is_beside else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._integral_s = integral_bound(
                self._problem, self._budget_bytes, self._solver, self._allowance.limits(), self._cancel
            )
        except BaseException as error:  # raised again in the thread that asks
            self._error = error

    def end(self) -> None:
        """Ends the MIP, if it is still running, and waits for its thread."""
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()

    def finish(self, *, is_enough: bool) -> float:
        """Seconds that no step within the budget is shorter than; does not wait for more when the LP is enough."""
        if is_enough:
            self.end()
        elif self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return max(self.linear_s, self._integral_s)
