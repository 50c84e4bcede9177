"""Linear programs as sparse arrays, the bound that row duals prove, and the solvers: HiGHS in-process, and all that
PuLP finds (CBC, GLPK, SCIP, Gurobi, ...), by name.

HiGHS and PuLP are loaded when the first program is solved: a training loop imports this module, but another process
makes its plans.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from poochplan.errors import SolverError, UsageError
from poochplan.formats.occupancy import Floats, Ints

Term = tuple[int, float]
"""A column and its coefficient."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """Minimise ``cost @ x`` with ``row_low <= A x <= row_high`` and ``low <= x <= high``; A by rows (CSR)."""

    cost: Floats
    low: Floats
    high: Floats
    is_integer: tuple[bool, ...]
    row_low: Floats
    row_high: Floats
    start: Ints
    column: Ints
    coefficient: Floats


class LinearModel:
    """State: the columns and rows added so far."""

    def __init__(self) -> None:
        self.cost, self._high, self.is_integer = list[float](), list[float](), list[bool]()
        self._row_low, self._row_high = list[float](), list[float]()
        self._start, self._column, self._coefficient = [0], list[int](), list[float]()

    def column(self, high: float, *, cost: float = 0.0, integer: bool = False) -> int:
        """Adds a variable between 0 and ``high``. Every column is bounded, so that :func:`proven_bound` is finite."""
        self.cost.append(cost)
        self._high.append(high)
        self.is_integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[Term], *, low: float = -math.inf, high: float = math.inf) -> None:
        """Adds ``low <= sum(coefficient * column) <= high``. Coefficients of a repeated column are added."""
        merged: dict[int, float] = {}
        for column, coefficient in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        self._column.extend(merged)
        self._coefficient.extend(merged.values())
        self._start.append(len(self._column))
        self._row_low.append(low)
        self._row_high.append(high)

    def arrays(self) -> Arrays:
        return Arrays(
            cost=np.array(self.cost),
            low=np.zeros(len(self.cost)),
            high=np.array(self._high),
            is_integer=tuple(self.is_integer),
            row_low=np.array(self._row_low),
            row_high=np.array(self._row_high),
            start=np.array(self._start, dtype=np.int64),
            column=np.array(self._column, dtype=np.int64),
            coefficient=np.array(self._coefficient),
        )


def proven_bound(model: Arrays, row_duals: Floats) -> float:
    """A lower bound on the model's optimum that holds for any ``row_duals``, however inexact the solver was.

    It is the Lagrangian of the rows, minimised over the columns' bounds (Neumaier and Shcherbina, "Safe bounds in
    linear and mixed-integer linear programming", Mathematical Programming 99, 2004, section 2). A dual that has the
    wrong sign for a one-sided row counts as 0.
    """
    duals = np.where((row_duals > 0) & np.isneginf(model.row_low), 0.0, row_duals)
    duals = np.where((duals < 0) & np.isposinf(model.row_high), 0.0, duals)
    side = np.where(duals > 0, model.row_low, model.row_high)
    constant = float(np.sum(duals[duals != 0] * side[duals != 0]))
    rows = np.repeat(np.arange(len(model.row_low)), np.diff(model.start))
    priced = np.bincount(model.column, weights=model.coefficient * duals[rows], minlength=len(model.cost))
    reduced = model.cost - priced
    return constant + float(np.sum(np.where(reduced > 0, reduced * model.low, reduced * model.high)))


_SHORT = {"highs": "HiGHS", "cbc": "PULP_CBC_CMD"}
_LONGEST_SOLVE_S = 300.0
"""Time limit of one program in a search that counts simulations: a thousand times the longest time seen. The solver may
not end on every program.
"""


@dataclass(frozen=True)
class SolverLimits:
    """When a solver may stop."""

    time_s: float = 60.0
    gap: float = 0.005
    """Relative to the objective."""
    absolute_gap: float = 0.0
    """In the unit of the objective. The solver stops at the gap that is reached first."""
    most_checks: int | None = None
    """With integrality: most times that HiGHS may ask whether to go on. It asks at fixed points of its work."""
    most_columns: int | None = None
    """A larger model is not solved with integrality at all."""

    def since(self, started_s: float) -> SolverLimits:
        """The rest of these limits after the model was built, which took from ``started_s`` until now."""
        return replace(self, time_s=max(0.5, self.time_s - (time.perf_counter() - started_s)))


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """A solver's result for a linear model."""

    values: Floats | None = None
    """Per column; None if no solution was found."""
    objective: float | None = None
    bound: float | None = None
    """No solution of the model is below it; None if nothing is proven."""


def choose_solver(name: str | None = None) -> str:
    """The name of an available solver: the requested one, else HiGHS, else CBC.

    Raises ``UsageError`` if PuLP does not know the requested solver, if it is not installed, or if there is no solver.
    """
    available = solver_names(only_installed=True)
    if name is None:
        for default in _SHORT:
            if _SHORT[default].lower() in available:
                return default
        raise UsageError("no ILP solver is installed; pip install highspy")
    wanted = _SHORT.get(name.lower(), name)
    if wanted.lower() in available:
        return next((short for short, full in _SHORT.items() if full.lower() == wanted.lower()), name.lower())
    short_of = {full.lower(): short for short, full in _SHORT.items()}
    found = ", ".join(sorted(short_of.get(full, full) for full in available)) or "none"
    what = "is not installed" if wanted.lower() in solver_names() else "is unknown"
    raise UsageError(f"solver {name!r} {what} (found: {found}); name one of these, or leave it out")


class Cancel:
    """Lets another thread end runs of HiGHS early; other solvers run to their limit."""

    def __init__(self) -> None:
        self.is_set = False
        self._running: list[Any] = []

    def attach(self, highs: Any) -> None:
        """Makes ``highs`` one of the runs that :meth:`set` ends."""
        highs.HandleUserInterrupt = True
        self._running.append(highs)
        if self.is_set:
            highs.cancelSolve()

    def set(self) -> None:
        """Ends the runs, and all later ones."""
        self.is_set = True
        for highs in self._running:
            highs.cancelSolve()


def solve_linear(
    model: Arrays, solver: str, limits: SolverLimits, *, relaxed: bool = False, cancel: Cancel | None = None
) -> LinearSolution:
    """Solves ``model`` with ``solver`` (a name from :func:`choose_solver`). Raises ``SolverError`` if the solver died.

    With ``relaxed``, integer columns may have any value between their bounds, and the bound is :func:`proven_bound` of
    the solver's duals.
    """
    try:
        if solver == "highs":
            return _solve_highs(model, limits, relaxed, cancel)
        return _solve_with_pulp(model, _SHORT.get(solver, solver), limits, relaxed)
    except (OSError, RuntimeError) as error:
        instead = "update highspy, or name another" if solver == "highs" else "leave it out to use HiGHS"
        raise SolverError(f"solver {solver} failed ({error}); {instead}") from error


def _solve_highs(model: Arrays, limits: SolverLimits, relaxed: bool, cancel: Cancel | None) -> LinearSolution:
    import highspy

    highs = _highs(limits)
    if cancel is not None:
        cancel.attach(highs)
    is_integral = any(model.is_integer) and not relaxed
    if is_integral and limits.most_columns is not None and len(model.cost) > limits.most_columns:
        return LinearSolution()
    if limits.most_checks is not None:
        highs.cbMipInterrupt += _checks(limits.most_checks)
    highs.passModel(_highs_model(model, is_integral))
    if not is_integral:
        highs.setOptionValue("solver", "ipm")
        highs.setOptionValue("run_crossover", "off")
    highs.run()
    info, solution = highs.getInfo(), highs.getSolution()
    is_solved = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = None
    if is_integral and np.isfinite(info.mip_dual_bound):
        bound = float(info.mip_dual_bound)
    elif is_solved and not is_integral:
        bound = proven_bound(model, np.array(solution.row_dual))
    if not is_solved:
        return LinearSolution(bound=bound)
    return LinearSolution(np.array(solution.col_value), float(info.objective_function_value), bound)


def _checks(most: int) -> Callable[[Any], None]:
    """Lets HiGHS ask so often whether to go on. When it asks depends on its work, not on the time."""
    left = itertools.count(most - 1, -1)
    return lambda event: event.interrupt() if next(left) <= 0 else None


class Warm:
    """State: a linear program in HiGHS. The bounds of columns may change between runs; each run begins at the last
    basis.

    The first run uses interior points, which are several times as fast as the simplex on large steps. It computes a
    basis only if another run follows (``is_solved_again``).
    """

    def __init__(self, model: Arrays, cancel: Cancel | None = None, *, is_solved_again: bool = True) -> None:
        self.highs = _highs(SolverLimits())
        if cancel is not None:
            cancel.attach(self.highs)
        self.highs.passModel(_highs_model(model, is_integral=False))
        self.highs.setOptionValue("solver", "ipm")
        self.highs.setOptionValue("run_crossover", "on" if is_solved_again else "off")

    def solve(self, limits: SolverLimits) -> tuple[bool, Floats | None, Floats | None]:
        """Whether it is infeasible, values of the columns (None without a solution), duals of the rows (or None)."""
        from highspy import HighsModelStatus, SolutionStatus

        highs, infeasible = self.highs, (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible)
        ends = HighsModelStatus.kOptimal, HighsModelStatus.kTimeLimit, HighsModelStatus.kInterrupt, *infeasible
        highs.setOptionValue("time_limit", highs.getRunTime() + _seconds(limits))  # its clock counts all runs
        highs.run()
        if highs.getModelStatus() not in ends:  # the simplex failed from this basis
            highs.clearSolver()
            highs.run()
        highs.setOptionValue("solver", "simplex")
        info, solution = highs.getInfo(), highs.getSolution()
        is_solved = info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible
        values = np.array(solution.col_value) if is_solved else None
        duals = np.array(solution.row_dual) if solution.dual_valid else None
        return highs.getModelStatus() in infeasible, values, duals

    def ray(self) -> Floats | None:
        """Row duals that prove that there is no solution; None if HiGHS has none."""
        highs = self.highs
        if highs.getDualRayExist()[1]:
            return np.array(highs.getDualRay()[2])
        # If HiGHS has no ray, it would run the program without its cost and keep the interpreter's lock: no other
        # thread could go on, not even to end the run. So this runs it first, without the lock.
        columns = np.arange(highs.getNumCol(), dtype=np.int32)
        cost = np.array(highs.getLp().col_cost_)
        highs.changeColsCost(len(columns), columns, np.zeros(len(columns)))
        highs.setOptionValue("presolve", "off")
        highs.run()
        found = np.array(highs.getDualRay()[2]) if highs.getDualRayExist()[1] else None
        highs.setOptionValue("presolve", "choose")
        highs.changeColsCost(len(columns), columns, cost)
        return found


def _seconds(limits: SolverLimits) -> float:
    return _LONGEST_SOLVE_S if limits.time_s == math.inf else max(0.1, limits.time_s)


def _highs(limits: SolverLimits) -> Any:
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802  (of HiGHS)
            self.setOptionValue("output_flag", False)  # else 1.16 greets on C's stdout here, within its __init__
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    highs: Any = Silent()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", _seconds(limits))
    highs.setOptionValue("threads", 1)  # two runs may go on at the same time
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_rel_gap", limits.gap)
    highs.setOptionValue("mip_abs_gap", limits.absolute_gap)
    return highs


def _highs_model(model: Arrays, is_integral: bool) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_low)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost, model.low, model.high
    lp.row_lower_, lp.row_upper_ = model.row_low, model.row_high
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = lp.num_col_, lp.num_row_
    lp.a_matrix_.start_, lp.a_matrix_.index_ = model.start, model.column
    lp.a_matrix_.value_ = model.coefficient
    if is_integral:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[integer] for integer in model.is_integer]
    return lp


@functools.cache
def _pulp() -> Any:
    """Loads PuLP. It keeps the error of a solver that is not installed, with all frames down to the first caller of
    plan(): without this, a model and its batch there would never be freed.
    """
    import pulp

    for solver in vars(pulp).values():
        error = getattr(solver, "err", None)
        while isinstance(error, BaseException):
            error.__traceback__, error = None, error.__context__
    return pulp


def solver_names(*, only_installed: bool = False) -> dict[str, str]:
    """PuLP's names of its solvers, by the same names in lower case."""
    return {name.lower(): name for name in _pulp().listSolvers(onlyAvailable=only_installed)}


def _solve_with_pulp(model: Arrays, solver: str, limits: SolverLimits, relaxed: bool) -> LinearSolution:
    """The result of a solver of PuLP; the name may be in any case."""
    pulp = _pulp()
    problem, variables, rows = _pulp_model(model, relaxed)
    options = {"timeLimit": limits.time_s, "gapRel": limits.gap, "threads": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            problem.solve(pulp.getSolver(solver_names()[solver.lower()], msg=False, **options))
        except pulp.PulpSolverError as error:
            raise RuntimeError(str(error)) from error
    is_solved = int(problem.sol_status) in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    found = [variable.varValue for variable in variables]
    if not is_solved or all(value is None for value in found):
        return LinearSolution()
    # The solver does not know a variable without a row: any value will do.
    values = np.where([value is None for value in found], model.low, np.array(found, dtype=np.float64))
    bound = None
    if relaxed and all(row.pi is not None for row in rows):
        bound = proven_bound(model, np.array([row.pi for row in rows], dtype=np.float64))
    return LinearSolution(values, float(model.cost @ values), bound)


def _pulp_model(model: Arrays, relaxed: bool) -> tuple[Any, list[Any], list[Any]]:
    """The model for PuLP, its variables and its rows. PuLP's rows are equations, or bounded on one side."""
    pulp = _pulp()
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"x{index}", low, high, cat="Integer" if integer and not relaxed else "Continuous")
        for index, (low, high, integer) in enumerate(zip(model.low, model.high, model.is_integer, strict=True))
    ]
    problem.setObjective(
        pulp.LpAffineExpression([(v, float(c)) for v, c in zip(variables, model.cost, strict=True) if c])
    )
    rows = []
    for row, (low, high) in enumerate(zip(model.row_low, model.row_high, strict=True)):
        span = slice(model.start[row], model.start[row + 1])
        terms = zip(model.column[span].tolist(), model.coefficient[span].tolist(), strict=True)
        expression = pulp.LpAffineExpression([(variables[column], value) for column, value in terms])
        if low == high:
            sense, side = pulp.LpConstraintEQ, float(low)
        elif np.isneginf(low):
            sense, side = pulp.LpConstraintLE, float(high)
        else:
            assert np.isposinf(high), "rows are equations or bounded on one side"
            sense, side = pulp.LpConstraintGE, float(low)
        rows.append(pulp.LpConstraint(expression, sense, rhs=side, name=f"r{row}"))
        problem.addConstraint(rows[-1])
    return problem, variables, rows
