"""PuLP: which solvers it finds, and a linear model in its words. Importing this loads it, and HiGHS with it."""

from __future__ import annotations

import warnings

import numpy as np
import pulp

from .linear import Arrays, proven_bound
from .solver_status import Result, SolverStatus


def _let_go_of_frames() -> None:
    """PuLP keeps the error of a solver that is not installed, and with it all frames down to who planned first: a
    model and its batch in there would live on for good.
    """
    for solver in vars(pulp).values():
        error = getattr(solver, "err", None)
        while isinstance(error, BaseException):
            error.__traceback__, error = None, error.__context__


_let_go_of_frames()
_STATUS = {
    pulp.LpSolutionOptimal: SolverStatus.OPTIMAL,
    pulp.LpSolutionIntegerFeasible: SolverStatus.TIME_LIMIT,
    pulp.LpSolutionNoSolutionFound: SolverStatus.NO_SOLUTION,
    pulp.LpSolutionInfeasible: SolverStatus.INFEASIBLE,
    pulp.LpSolutionUnbounded: SolverStatus.UNBOUNDED,
}


def solver_names(*, only_installed: bool = False) -> dict[str, str]:
    """PuLP's names of the solvers that it knows, by the same in lower case."""
    return {name.lower(): name for name in pulp.listSolvers(onlyAvailable=only_installed)}


def solve_with_pulp(model: Arrays, solver: str, time_s: float, gap: float, relaxed: bool) -> Result:
    """What the solver of that name, PuLP's in any case, says within so many seconds or that relative gap.

    Raises
    ------
    RuntimeError
        The solver died.
    """
    problem, variables, rows = _pulp_model(model, relaxed)
    options = {"timeLimit": time_s, "gapRel": gap, "threads": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            problem.solve(pulp.getSolver(solver_names()[solver.lower()], msg=False, **options))
        except pulp.PulpSolverError as error:
            raise RuntimeError(str(error)) from error
    status = _STATUS.get(int(problem.sol_status), SolverStatus.NOT_SOLVED)
    found = [variable.varValue for variable in variables]
    if not status.has_solution or all(value is None for value in found):
        return status.without_solution(), None, None, None
    # A variable that stands in no row is unknown to the solver: any value will do.
    values = np.where([value is None for value in found], model.low, np.array(found, dtype=np.float64))
    bound = None
    if relaxed and all(row.pi is not None for row in rows):
        bound = proven_bound(model, np.array([row.pi for row in rows], dtype=np.float64))
    return status, values, float(model.cost @ values), bound


def _pulp_model(model: Arrays, relaxed: bool) -> tuple[pulp.LpProblem, list[pulp.LpVariable], list[pulp.LpConstraint]]:
    """The model as PuLP wants it; rows are equations or bounded on one side."""
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
