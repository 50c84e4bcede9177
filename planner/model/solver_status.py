"""How a solver's run ended, in the same words whichever it was."""

from __future__ import annotations

from enum import StrEnum

from poochplan.planner.problem.arrays import Floats


class SolverStatus(StrEnum):
    """How a solver's run ended."""

    OPTIMAL = "optimal"  # within the gap
    TIME_LIMIT = "time limit"  # with a solution
    CHECK_LIMIT = "check limit"  # with a solution; see ``Limits.most_checks``
    TOO_LARGE = "too large"  # not tried; see ``Limits.most_columns``
    NO_SOLUTION = "no solution found"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    NOT_SOLVED = "not solved"  # whatever else a solver may say

    @property
    def has_solution(self) -> bool:
        """Whether a run that ended so may have found one."""
        return self in (SolverStatus.OPTIMAL, SolverStatus.TIME_LIMIT, SolverStatus.CHECK_LIMIT)

    def without_solution(self) -> SolverStatus:
        """How it ended where none was found."""
        return SolverStatus.NO_SOLUTION if self.has_solution else self


Result = tuple[SolverStatus, Floats | None, float | None, float | None]
"""Status, value of each column, objective, and what no solution is below."""
