"""A linear model under construction, as sparse arrays; how a solver's run ended; and the bound that row duals prove."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from poochplan.formats.occupancy import Floats, Ints


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


@dataclass
class LinearModel:
    """State: the columns and rows added so far."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    _row_low: list[float] = field(default_factory=list)
    _row_high: list[float] = field(default_factory=list)
    _start: list[int] = field(default_factory=lambda: [0])
    _column: list[int] = field(default_factory=list)
    _coefficient: list[float] = field(default_factory=list)

    def column(self, high: float, *, cost: float = 0.0, integer: bool = False) -> int:
        """Adds a variable between 0 and ``high``; every column is bounded, so that :func:`proven_bound` is finite."""
        self.cost.append(cost)
        self.low.append(0.0)
        self.high.append(high)
        self.is_integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[Term], *, low: float = -math.inf, high: float = math.inf) -> None:
        """Adds ``low <= sum(coefficient * column) <= high``; a column that comes twice is added up."""
        merged: dict[int, float] = {}
        for column, coefficient in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        self._column.extend(merged)
        self._coefficient.extend(merged.values())
        self._start.append(len(self._column))
        self._row_low.append(low)
        self._row_high.append(high)

    def arrays(self) -> Arrays:
        """The model as arrays."""
        return Arrays(
            cost=np.array(self.cost),
            low=np.array(self.low),
            high=np.array(self.high),
            is_integer=tuple(self.is_integer),
            row_low=np.array(self._row_low),
            row_high=np.array(self._row_high),
            start=np.array(self._start, dtype=np.int64),
            column=np.array(self._column, dtype=np.int64),
            coefficient=np.array(self._coefficient),
        )


def proven_bound(model: Arrays, row_duals: Floats) -> float:
    """A lower bound on the model's optimum that holds for any ``row_duals``, however inexact the solver was.

    The Lagrangian of the rows, minimised over the columns' bounds (Neumaier and Shcherbina, "Safe bounds in linear and
    mixed-integer linear programming", Mathematical Programming 99, 2004, section 2): a dual of the wrong sign for a
    one-sided row is taken as 0.
    """
    duals = np.where((row_duals > 0) & np.isneginf(model.row_low), 0.0, row_duals)
    duals = np.where((duals < 0) & np.isposinf(model.row_high), 0.0, duals)
    side = np.where(duals > 0, model.row_low, model.row_high)
    constant = float(np.sum(duals[duals != 0] * side[duals != 0]))
    rows = np.repeat(np.arange(len(model.row_low)), np.diff(model.start))
    priced = np.bincount(model.column, weights=model.coefficient * duals[rows], minlength=len(model.cost))
    reduced = model.cost - priced
    return constant + float(np.sum(np.where(reduced > 0, reduced * model.low, reduced * model.high)))
