"""What the fluid model PLAN decides: by its relaxation rounded, or by branch and bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poochplan.formats.plan import Decision
from poochplan.planner.problem.arrays import Floats
from poochplan.planner.problem.problem import Problem
from poochplan.planner.rows.fluid_rows import build_fluid_model

from .fluid import FluidModel, Request
from .solver_status import SolverStatus
from .solvers import Limits, solve_linear


@dataclass(frozen=True)
class Solution:
    """What the solver says about PLAN."""

    decisions: tuple[Decision, ...] | None
    """None when it found none."""
    objective_s: float | None
    """Overhead in seconds by the fluid model."""
    status: SolverStatus


def solve_fluid(
    problem: Problem,
    request: Request,
    solver: str,
    limits: Limits,
    *,
    relaxed: bool = False,
    start: Sequence[Decision] | None = None,
) -> Solution:
    """Decisions that PLAN finds best; values outside ``request.candidates`` are kept.

    ``relaxed`` solves without integrality and takes for each value the decision with the largest share.
    ``limits.absolute_gap`` is in seconds. ``start`` are decisions to begin from, where the solver takes some.
    """
    started_s = time.perf_counter()
    model = build_fluid_model(problem, request)
    scaled = replace(limits.since(started_s), absolute_gap=limits.absolute_gap / model.time_unit_s)
    first = None if start is None or relaxed else _columns_of(model, start)
    found = solve_linear(model.linear.arrays(), solver, scaled, relaxed=relaxed, start=first)
    return Solution(
        decisions=None if found.values is None else _decisions(model, found.values),
        objective_s=None if found.objective is None else found.objective * model.time_unit_s,
        status=found.status,
    )


def _decisions(model: FluidModel, values: Floats) -> tuple[Decision, ...]:
    decisions = []
    for value in range(model.problem.value_count):
        swap = float(values[model.swap[value]]) if value in model.swap else 0.0
        recompute = float(values[model.recompute[value]]) if value in model.recompute else 0.0
        keep = 1.0 - swap - recompute
        if recompute >= max(swap, keep):
            decisions.append(Decision.RECOMPUTE)
        else:
            decisions.append(Decision.SWAP if swap >= keep else Decision.KEEP)
    return tuple(decisions)


def _columns_of(model: FluidModel, decisions: Sequence[Decision]) -> dict[int, float]:
    columns = {column: float(decisions[value] is Decision.SWAP) for value, column in model.swap.items()}
    for value, column in model.recompute.items():
        columns[column] = float(decisions[value] is Decision.RECOMPUTE)
    return columns
