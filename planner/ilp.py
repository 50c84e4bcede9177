"""Solves the fluid model with whatever solver PuLP finds: HiGHS in-process, CBC where it is missing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import pulp

from ..errors import UsageError
from .fluid import build_fluid_model
from .problem import Problem
from .schema import Decision

_NAMES = {"highs": "HiGHS", "cbc": "PULP_CBC_CMD"}
_STATUS = {
    pulp.LpSolutionOptimal: "optimal",
    pulp.LpSolutionIntegerFeasible: "time limit",
    pulp.LpSolutionNoSolutionFound: "no solution found",
    pulp.LpSolutionInfeasible: "infeasible",
    pulp.LpSolutionUnbounded: "unbounded",
}


@dataclass(frozen=True)
class Solution:
    """What the solver says about the fluid model."""

    decisions: tuple[Decision, ...] | None
    """None when it found none."""
    objective_s: float | None
    """Overhead in seconds by the fluid model."""
    status: str
    solver: str
    columns: int
    rows: int
    wall_s: float


def choose_solver(name: str | None = None) -> str:
    """The name of an available solver: the one asked for, else HiGHS, else CBC.

    Raises
    ------
    UsageError
        The solver asked for is unknown to PuLP or not installed, or none is there.
    """
    available = {solver.lower(): solver for solver in pulp.listSolvers(onlyAvailable=True)}
    if name is None:
        for default in _NAMES:
            if _NAMES[default].lower() in available:
                return default
        raise UsageError("no ILP solver is installed; pip install highspy")
    wanted = _NAMES.get(name.lower(), name)
    if wanted.lower() in available:
        return name.lower()
    found = ", ".join(short for short, full in _NAMES.items() if full.lower() in available) or "none"
    raise UsageError(f"solver {name!r} is not available (found: {found}); pip install highspy, or leave it out")


def solve_fluid(
    problem: Problem,
    budget_bytes: int,
    candidates: Iterable[int],
    *,
    solver: str | None = None,
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    absolute_gap_s: float = 0.0,
    threads: int = 2,
    tightened: dict[int, int] | None = None,
    host_bytes: int | None = None,
) -> Solution:
    """Decisions that the fluid model finds best within ``budget_bytes``; values outside ``candidates`` are kept.

    The solver stops at ``gap`` (relative to the overhead) or at ``absolute_gap_s``, whichever is reached first.
    """
    started_s = time.perf_counter()
    name = choose_solver(solver)
    model = build_fluid_model(problem, budget_bytes, candidates, tightened, host_bytes)
    remaining_s = max(1.0, time_limit_s - (time.perf_counter() - started_s))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            engine = _engine(name, remaining_s, gap, absolute_gap_s / model.time_unit_s, threads)
            model.lp.solve(engine)
        status = int(model.lp.sol_status)
    except pulp.PulpSolverError as error:
        raise UsageError(f"solver {name} failed ({error}); pip install highspy, or choose another") from error
    solved = status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) and _has_values(model.swap)
    decisions = None
    if solved:
        decisions = tuple(_decision(model.swap, model.recompute, value) for value in range(problem.value_count))
    objective = pulp.value(model.lp.objective) if solved else None
    return Solution(
        decisions=decisions,
        objective_s=None if objective is None else float(objective) * model.time_unit_s,
        status=_STATUS.get(status, "not solved"),
        solver=name,
        columns=model.lp.numVariables(),
        rows=model.lp.numConstraints(),
        wall_s=time.perf_counter() - started_s,
    )


def _engine(name: str, time_limit_s: float, gap: float, absolute_gap: float, threads: int) -> pulp.LpSolver:
    full = _NAMES.get(name, name)
    if full != "HiGHS":
        by_name = {solver.lower(): solver for solver in pulp.listSolvers()}
        full = by_name[full.lower()]
    return pulp.getSolver(full, msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=absolute_gap, threads=threads)


def _has_values(swap: dict[int, pulp.LpVariable]) -> bool:
    return all(variable.varValue is not None for variable in swap.values())


def _decision(swap: dict[int, pulp.LpVariable], recompute: dict[int, pulp.LpVariable], value: int) -> Decision:
    if value in swap and swap[value].varValue > 0.5:
        return Decision.SWAP
    if value in recompute and recompute[value].varValue > 0.5:
        return Decision.RECOMPUTE
    return Decision.KEEP
