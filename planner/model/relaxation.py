"""BOUND's linear program, kept in the solver: solved once, then again with the decisions of some values fixed.

Only the bounds of decision columns change between two solves, so that the dual simplex goes on from the basis it has;
the first is by interior points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import movable
from poochplan.planner.problem.arrays import Floats
from poochplan.planner.problem.problem import Problem
from poochplan.planner.rows.fluid_rows import build_fluid_model

from .fluid import FluidModel, Purpose, Request
from .linear import proven_bound
from .solver_status import SolverStatus
from .solvers import Cancel, Limits, Warm

PROOF = 1e-7
"""A ray shows that no plan is left where what it proves of nothing is above this share of its own size."""
FEW = 300
"""With more values BOUND has fewer columns for each: it says a little less, and is solved in a fraction of the time."""
SHORT_WINDOW = 4
"""Then a value has so many returns before its own use that have a column."""
FREE_SHARE = 0.002
"""Then the smallest values, together this share of the saved bytes, come and go for nothing."""

MOST_COLUMNS = 10_000
"""With more columns no basis is looked for: that takes several times as long as the interior points."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """What the relaxation says where some decisions are fixed."""

    bound_s: float
    """No plan with these decisions within the budget has a shorter step; infinite where there is none that takes less
    than all copies and all replays one after another."""
    status: SolverStatus
    keep: Floats | None
    """Per saved value: the share of it that is kept; None when no solution was found. 1 for what cannot move."""
    swap: Floats | None
    recompute: Floats | None


class Relaxation:
    """State: the linear program in the solver, with the decisions that the last solve fixed.

    Two of them may be solved in two threads at once: HiGHS lets go of the interpreter. One may not.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, cancel: Cancel | None = None, *, is_solved_again: bool = True
    ) -> None:
        self.problem = problem
        self._model = bound_model(problem, budget_bytes)
        arrays = self._model.linear.arrays()
        self._arrays = replace(arrays, low=arrays.low.copy(), high=arrays.high.copy())
        self._no_cost = replace(self._arrays, cost=np.zeros_like(arrays.cost))
        self._free = arrays
        is_solved_again = is_solved_again and len(arrays.cost) <= MOST_COLUMNS
        self._warm = Warm(self._arrays, cancel, is_solved_again=is_solved_again)
        self._fixed: dict[int, Decision] = {}
        self.is_solved_again = is_solved_again
        """Whether there is a basis to go on from."""

    def solve(self, fixed: Mapping[int, Decision], limits: Limits) -> Relaxed:
        """Solves with the values of ``fixed`` decided and all others free; values that cannot move are ignored.

        ``limits`` counts from now. What a run that it ends has proven by then is the bound.
        """
        self._fix(fixed)
        status, values, duals = self._warm.solve(limits)
        if status is SolverStatus.INFEASIBLE and self._is_proven_empty():
            return Relaxed(math.inf, status, None, None, None)
        bound = None if duals is None else proven_bound(self._arrays, duals)
        keep, swap, recompute = (None, None, None) if values is None else self._shares(values)
        return Relaxed(bound_seconds(self._model, bound), status, keep, swap, recompute)

    def _fix(self, fixed: Mapping[int, Decision]) -> None:
        for value in [value for value in self._fixed if value not in fixed]:
            self._bound_columns(value, None)
        for value, decision in fixed.items():
            if value in self._model.swap and self._fixed.get(value) is not decision:
                self._bound_columns(value, decision)
        self._fixed = {value: decision for value, decision in fixed.items() if value in self._model.swap}

    def _bound_columns(self, value: int, decision: Decision | None) -> None:
        """Fixes the columns of a value, or frees them again."""
        model, arrays = self._model, self._arrays
        if decision is Decision.RECOMPUTE and value not in model.recompute:
            raise ValueError(f"value {value}: expected one that has a replay, found none; fix another decision")
        for columns, chosen in ((model.swap, Decision.SWAP), (model.recompute, Decision.RECOMPUTE)):
            if value not in columns:
                continue
            column = columns[value]
            low, high = float(self._free.low[column]), float(self._free.high[column])
            if decision is not None:
                low = high = float(decision is chosen)
            arrays.low[column], arrays.high[column] = low, high
            self._warm.bound_column(column, low, high)

    def _is_proven_empty(self) -> bool:
        ray = self._warm.ray()
        if ray is None:
            return False
        least = PROOF * float(np.abs(ray).max(initial=0.0))
        return max(proven_bound(self._no_cost, ray), proven_bound(self._no_cost, -ray)) > least

    def _shares(self, values: Floats) -> tuple[Floats, Floats, Floats]:
        count = self.problem.value_count
        swap, recompute = np.zeros(count), np.zeros(count)
        swap[list(self._model.swap)] = values[list(self._model.swap.values())]
        recompute[list(self._model.recompute)] = values[list(self._model.recompute.values())]
        return np.clip(1.0 - swap - recompute, 0.0, 1.0), swap, recompute


def bound_model(problem: Problem, budget_bytes: int, *, whole: tuple[int, ...] = (), grid: int = 60) -> FluidModel:
    """BOUND, for all values that may move; ``whole`` and ``grid`` as in :class:`~.fluid.Request`."""
    candidates = movable(problem)
    request = Request(budget_bytes, tuple(candidates), Purpose.BOUND, whole=whole, grid=grid)
    if len(candidates) > FEW:
        free = _smallest(problem, [value for value in candidates if value not in whole], FREE_SHARE)
        rest = tuple(value for value in candidates if value not in free)
        request = replace(request, candidates=rest, free=tuple(sorted(free)), window=SHORT_WINDOW)
    return build_fluid_model(problem, request)


def _smallest(problem: Problem, candidates: list[int], share: float) -> set[int]:
    """The smallest values, together at most this share of the saved bytes."""
    sizes, found = problem.rounded_bytes, set[int]()
    left = share * float(sizes.sum())
    for value in sorted(candidates, key=lambda value: (int(sizes[value]), value)):
        left -= float(sizes[value])
        if left < 0:
            break
        found.add(value)
    return found


def bound_seconds(model: FluidModel, bound: float | None) -> float:
    """Seconds that no plan's step is shorter than, where nothing of the model is below ``bound``."""
    # Above ``longest`` the columns' upper bounds could cut off a plan.
    added = 0.0 if bound is None else min(max(0.0, bound), model.longest)
    return max(model.problem.keep_all_s, model.problem.step_s + added * model.time_unit_s)
