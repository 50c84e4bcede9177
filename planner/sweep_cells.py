"""One cell of a sweep: one policy at one budget, judged by the simulator."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner.judge.candidate import Candidate
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.problem.problem import Problem

from .planning import ILP, plan

Cell = tuple[str, int]
"""A policy and a budget in bytes."""


class CellStatus(StrEnum):
    """How a cell ended, where no search says so."""

    FITS = "fits"  # the policy's plan is within the budget
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """What one policy's plan does within one budget; all figures are the simulator's."""

    policy: str
    budget_bytes: int
    feasible: bool
    """Whether the policy found a plan within the budget."""
    peak_bytes: int | None = None
    """Most live bytes; the least that the policy needs where it found no plan. None for a cell that failed."""
    step_s: float | None = None
    """This and all below: None where there is no plan."""
    overhead: float | None = None
    stall_s: float | None = None
    replay_s: float | None = None
    out_bytes: int | None = None
    in_bytes: int | None = None
    bound_overhead: float | None = None
    """Proven: no plan within this budget has a smaller overhead. None where nothing is proven."""
    gap: float | None = None
    """(step time - proven bound) / bound."""
    wall_s: float = 0.0
    """Seconds it took to decide."""
    status: SolveStatus | CellStatus
    """How the search ended, of a cell with a plan of the ILP's."""
    failure: str = ""
    """What went wrong in a cell that failed."""

    @property
    def failed(self) -> bool:
        """Whether there is no answer for this cell."""
        return self.status is CellStatus.FAILED

    @property
    def outcome(self) -> str:
        """The status in words, with what went wrong."""
        return f"{self.status}: {self.failure}" if self.failed else str(self.status)

    def columns(self) -> dict[str, Any]:
        """The point as files and tables show it: its figures by name, and the outcome as ``status``."""
        shown = asdict(self) | {"status": self.outcome}
        del shown["failure"]
        return shown


@dataclass(frozen=True)
class Solving:
    """How each cell is solved."""

    solver: str | None = None
    time_limit_s: float = 20.0
    gap: float = 0.005
    arena: Literal["auto", "on", "off"] = "auto"
    """Of the ILP's budgets; see ``plan``. Policies that decide alone know none."""


def solve_cell(profile: Profile, solving: Solving, cell: Cell) -> SweepPoint:
    """The cell's point; whatever goes wrong becomes part of it."""
    policy, budget_bytes = cell
    started_s = time.perf_counter()
    try:
        if policy == ILP:
            made = plan(
                profile,
                budget_bytes,
                solver=solving.solver,
                time_limit_s=solving.time_limit_s,
                gap=solving.gap,
                threads=1,
                arena=solving.arena,
            )
            return _of_plan(made, time.perf_counter() - started_s)
        given = PolicyInput.of(profile, budget_bytes)
        candidate = run_policy(policy, given)
        return _of_candidate(given.problem, candidate, cell, time.perf_counter() - started_s)
    except InfeasibleError as error:
        return _infeasible(cell, error.smallest_budget_bytes, time.perf_counter() - started_s)
    except Exception as error:
        return failed_cell(
            cell, f"{type(error).__name__}: {' '.join(str(error).split())}", time.perf_counter() - started_s
        )


def _of_plan(made: Plan, wall_s: float) -> SweepPoint:
    prediction, solve = made.prediction, made.solve
    bound = None
    if solve.bound_s is not None and prediction.in_core_step_s > 0:
        bound = solve.bound_s / prediction.in_core_step_s - 1
    return SweepPoint(
        policy=ILP,
        budget_bytes=made.budget_bytes,
        feasible=True,
        peak_bytes=max(prediction.peak_bytes, prediction.first_step_peak_bytes),
        step_s=prediction.step_s,
        overhead=prediction.overhead,
        stall_s=prediction.stall_s,
        replay_s=prediction.replay_s,
        out_bytes=prediction.out_bytes,
        in_bytes=prediction.in_bytes,
        bound_overhead=bound,
        gap=solve.gap,
        wall_s=wall_s,
        status=solve.status,
    )


def _of_candidate(problem: Problem, candidate: Candidate, cell: Cell, wall_s: float) -> SweepPoint:
    policy, budget_bytes = cell
    if candidate.peak_bytes > budget_bytes:
        return _infeasible(cell, candidate.peak_bytes, wall_s)
    simulation = candidate.simulation
    return SweepPoint(
        policy=policy,
        budget_bytes=budget_bytes,
        feasible=True,
        peak_bytes=candidate.peak_bytes,
        step_s=simulation.step_s,
        overhead=problem.overhead(simulation.step_s),
        stall_s=simulation.stall_s,
        replay_s=simulation.replay_s,
        out_bytes=simulation.out_bytes,
        in_bytes=simulation.in_bytes,
        wall_s=wall_s,
        status=CellStatus.FITS,
    )


def _infeasible(cell: Cell, peak_bytes: int, wall_s: float) -> SweepPoint:
    policy, budget_bytes = cell
    return SweepPoint(
        policy=policy,
        budget_bytes=budget_bytes,
        feasible=False,
        peak_bytes=peak_bytes,
        wall_s=wall_s,
        status=CellStatus.INFEASIBLE,
    )


def failed_cell(cell: Cell, why: str, wall_s: float = 0.0) -> SweepPoint:
    policy, budget_bytes = cell
    return SweepPoint(
        policy=policy,
        budget_bytes=budget_bytes,
        feasible=False,
        wall_s=wall_s,
        status=CellStatus.FAILED,
        failure=why,
    )
