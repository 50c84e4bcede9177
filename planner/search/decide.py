"""Decisions of the fluid model PLAN: from its rounded relaxation, or by branch and bound."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from poochplan.formats.occupancy import Floats
from poochplan.formats.plan import Decision
from poochplan.planner.search.decision_constraints import add_decisions, add_early_returns, add_link
from poochplan.planner.search.fluid import FluidModel, Request, slots_of
from poochplan.planner.search.memory_constraints import add_memory
from poochplan.planner.search.solvers import SolverLimits, SolverStatus, solve_linear
from poochplan.planner.search.time_constraints import add_time
from poochplan.planner.simulator.problem import Problem


def build_fluid_model(problem: Problem, request: Request) -> FluidModel:
    """The model that ``request`` asks for, complete."""
    sizes = problem.rounded_bytes[list(request.candidates)]
    unit = max(1.0, float(np.mean(sizes)) / 10) if len(sizes) else 1.0
    model = FluidModel(problem, request, slots_of(problem), unit, problem.step_s / 1000 or 1.0)
    add_decisions(model)
    add_early_returns(model)
    add_link(model)
    add_time(model)
    add_memory(model)
    return model


@dataclass(frozen=True)
class Solution:
    """The solver's result for PLAN."""

    decisions: tuple[Decision, ...] | None
    """None if it found none."""
    objective_s: float | None
    """Overhead in seconds by the fluid model."""
    status: SolverStatus


def solve_fluid(
    problem: Problem, request: Request, solver: str, limits: SolverLimits, *, relaxed: bool = False
) -> Solution:
    """The best decisions by PLAN; values outside ``request.candidates`` are kept.

    ``relaxed`` solves without integrality and takes for each value the decision with the largest share.
    ``limits.absolute_gap`` is in seconds.
    """
    started_s = time.perf_counter()
    model = build_fluid_model(problem, request)
    scaled = replace(limits.since(started_s), absolute_gap=limits.absolute_gap / model.time_unit_s)
    found = solve_linear(model.linear.arrays(), solver, scaled, relaxed=relaxed)
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
