"""Every policy at every budget, for the frontier of memory against overhead; or every policy at the budget of one plan.
The same simulator judges all plans.

A cell of the sweep is one policy at one budget. Cells run in separate processes with one solver thread each. A cell
that fails does not affect the others.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeAlias

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan, Prediction, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner.arena.reserved import On, budget_on, covered_bytes, in_core_bytes
from poochplan.planner.planning import ILP, plan, smallest_budget
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.policies.registry import unknown_policy
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.search.solvers import choose_solver
from poochplan.planner.simulator.evaluator import begin_build, untold_absence
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.writing import write_plan


def all_policies() -> tuple[str, ...]:
    """Names of the policies that are compared: the ILP first."""
    return (ILP, *policy_names())


Cell = tuple[str, int]
"""A policy and a budget in bytes."""


class CellStatus(StrEnum):
    """How a cell ended that has no status of a search."""

    FITS = "fits"  # the policy's plan is within the budget
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The results of one policy's plan within one budget. All figures come from the simulator."""

    policy: str
    budget_bytes: int
    feasible: bool
    """Whether the policy found a plan within the budget."""
    peak_bytes: int | None = None
    """Most live bytes; without a plan, the least that the policy needs of what budgets cover. None for a cell that
    failed.
    """
    step_s: float | None = None
    """This and all below are None without a plan."""
    overhead: float | None = None
    stall_s: float | None = None
    replay_s: float | None = None
    out_bytes: int | None = None
    in_bytes: int | None = None
    bound_overhead: float | None = None
    """No plan within this budget has a smaller overhead. None if nothing is proven."""
    gap: float | None = None
    """(step time - proven bound) / bound."""
    wall_s: float = 0.0
    """Seconds of deciding."""
    status: SolveStatus | CellStatus
    """How the search ended, if the cell has a plan of the ILP."""
    failure: str = ""

    @property
    def failed(self) -> bool:
        return self.status is CellStatus.FAILED

    @property
    def outcome(self) -> str:
        """The status in words, with the error."""
        return f"{self.status}: {self.failure}" if self.failed else str(self.status)

    def columns(self) -> dict[str, Any]:
        """The columns of files and tables: the figures by name, and the outcome as ``status``."""
        shown = asdict(self) | {"status": self.outcome}
        del shown["failure"]
        return shown


@dataclass(frozen=True)
class Solving:
    """How each cell is solved; see ``plan``."""

    solver: str | None = None
    time_limit_s: float = 20.0
    gap: float = 0.005
    arena: Literal["auto", "on", "off"] = "auto"
    """Another policy than the ILP has an arena if that of its plan happens to fit the budget."""
    on: On | None = None


def solve_cell(profile: Profile, solving: Solving, cell: Cell) -> SweepPoint:
    """The cell's point; an error becomes part of it."""
    started_s = time.perf_counter()
    try:
        facts = _facts_of(profile, solving, *cell)
    except InfeasibleError as error:
        facts = {"status": CellStatus.INFEASIBLE, "peak_bytes": error.smallest_budget_bytes}
    except Exception as error:
        facts = {"status": CellStatus.FAILED, "failure": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return _point(cell, wall_s=time.perf_counter() - started_s, **facts)


def _point(cell: Cell, **facts: Any) -> SweepPoint:
    """A cell's point with these facts; only a plan that fits has the seconds of a step."""
    policy, budget_bytes = cell
    return SweepPoint(policy=policy, budget_bytes=budget_bytes, feasible="step_s" in facts, **facts)


def _facts_of(profile: Profile, solving: Solving, policy: str, budget_bytes: int) -> dict[str, Any]:
    if policy != ILP:
        given = PolicyInput(Problem.of(profile), budget_bytes)
        candidate, on = run_policy(policy, given), budget_on(profile, solving.on)
        taken_bytes = covered_bytes(given.problem, candidate, on)
        if taken_bytes > budget_bytes:
            return {"status": CellStatus.INFEASIBLE, "peak_bytes": taken_bytes}
        found = Optimum(candidate, policy)
        made = write_plan(given, found, 0.0, is_laid_out=solving.arena != "off", on=on)
        return {"status": CellStatus.FITS, **_figures(made.prediction, "out_bytes", "in_bytes")}
    made = plan(profile, budget_bytes, threads=1, **asdict(solving))
    if made.covered_bytes > budget_bytes:
        return {"status": CellStatus.INFEASIBLE, "peak_bytes": made.covered_bytes}
    proven = {"status": made.solve.status, "bound_overhead": made.bound_overhead, "gap": made.solve.gap}
    return proven | _figures(made.prediction, "out_bytes", "in_bytes")


def _figures(does: Prediction, *more: str) -> dict[str, Any]:
    """The figures that all tables have, and ``more``; the peak includes the first step."""
    names = ("step_s", "overhead", "stall_s", "replay_s", *more)
    peak_bytes = max(does.peak_bytes, does.first_step_peak_bytes)
    return {"peak_bytes": peak_bytes} | {name: getattr(does, name) for name in names}


PointCallback: TypeAlias = Callable[[SweepPoint], None]
"""Called with each cell that is done."""
GRACE_S = 2.0
"""Seconds that a process may take to end after the request."""
_given: tuple[Profile, Solving]
"""The data that every cell of a worker process needs, sent once."""


def _begin(profile: Profile, solving: Solving) -> None:
    global _given
    _given = profile, solving
    warnings.filterwarnings("ignore", "poochplan: ")  # the parent gives it once
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker when its parent dies. Otherwise it would wait for cells forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _solve_given(cell: Cell) -> SweepPoint:
    return solve_cell(*_given, cell)


def solve_in_processes(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: PointCallback
) -> dict[Cell, SweepPoint]:
    """Solves all cells. If a process died, its cells are tried again, each in its own process."""
    slow_first = sorted(cells, key=lambda cell: cell[0] != ILP)
    found = _in_pool(profile, solving, slow_first, processes, tell)
    for cell in cells:
        if cell not in found:
            found |= _in_pool(profile, solving, [cell], 1, tell)
        if cell not in found:
            failure = "its process died, perhaps of too little memory"
            found[cell] = _point(cell, status=CellStatus.FAILED, failure=failure)
            tell(found[cell])
    return found


def _in_pool(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: PointCallback
) -> dict[Cell, SweepPoint]:
    """The points of cells whose processes did not die. An interrupt ends the processes and is raised again."""
    found: dict[Cell, SweepPoint] = {}
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(profile, solving)
    )
    try:
        with _interrupts_held():
            futures = {pool.submit(_solve_given, cell): cell for cell in cells}
        for future in as_completed(futures):
            with contextlib.suppress(BrokenProcessPool):
                found[futures[future]] = future.result()
                tell(found[futures[future]])
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _end([child for child in multiprocessing.active_children() if child not in before])
        raise
    pool.shutdown()
    return found


def _end(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        # ``is_alive`` may be true of an ended process while the pool's own thread collects the exit code.
        if not multiprocessing.connection.wait([worker.sentinel], timeout=GRACE_S):
            worker.kill()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started in this block never get the terminal's interrupt; their parent gets it and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


DEFAULT_POINTS = 9
Finished = Callable[[SweepPoint, int, int], None]
"""Called in the sweep's own process with each point that is done, the number done, and the number of all."""


def sweep(
    profile: Profile,
    budgets: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    *,
    solving: Solving | None = None,
    processes: int | None = None,
    finished: Finished | None = None,
) -> list[SweepPoint]:
    """One point for every policy and budget, in the order of ``policies`` and then of ``budgets``.

    Parameters
    ----------
    budgets: bytes; :func:`default_budgets` if None.
    policies: names from :func:`all_policies`; all of them if None.
    processes: number of cells that run at a time; the number of usable cores if None. With 1 the cells run in this
        process. Otherwise the calling script needs the usual ``if __name__ == "__main__":``.
    finished: called with each cell that is done, in any order. An interrupt ends the processes and is raised again;
        only these calls then report the finished cells.

    Raises
    ------
    UsageError
        A policy or the solver is unknown.
    PoochError
        The profile cannot be planned.
    """
    solving = solving or Solving()
    budgets = default_budgets(profile, arena=solving.arena) if budgets is None else budgets
    names = all_policies() if policies is None else tuple(policies)
    for name in names:
        if name not in all_policies():
            raise unknown_policy(name)
    if ILP in names:
        choose_solver(solving.solver)
    Problem.of(profile)
    cells = list(dict.fromkeys(itertools.product(names, budgets)))
    processes = min(processes or usable_processors(), len(cells))
    done = itertools.count(1)

    def tell(point: SweepPoint) -> None:
        if finished is not None:
            finished(point, next(done), len(cells))

    if processes <= 1:
        found = {}
        for cell in cells:
            found[cell] = solve_cell(profile, solving, cell)
            tell(found[cell])
    else:
        begin_build()
        found = solve_in_processes(profile, solving, cells, processes, tell)
        if line := untold_absence():
            warnings.warn(f"poochplan: {line}", UserWarning, stacklevel=2)
    return [found[cell] for cell in cells]


def default_budgets(
    profile: Profile,
    points: int = DEFAULT_POINTS,
    most_bytes: int | None = None,
    *,
    arena: Literal["auto", "on", "off"] = "auto",
    on: On | None = None,
) -> tuple[int, ...]:
    """Evenly spaced budgets from the smallest that has a plan to the in-core peak, or to ``most_bytes`` if less."""
    first, last = smallest_budget(profile, arena=arena), in_core_bytes(profile, on)
    last = max(first, last if most_bytes is None else min(last, most_bytes))
    steps = max(1, points - 1)
    return tuple(dict.fromkeys(first + (last - first) * index // steps for index in range(steps + 1)))


def usable_processors() -> int:
    """Those that this process may use, where the system tells (Linux); else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One policy's plan within one budget."""

    policy: str
    peak_bytes: int
    """Most live bytes at any moment, including the first step."""
    fits: bool
    step_s: float
    overhead: float
    """Simulated step time over in-core step time, minus 1."""
    stall_s: float
    replay_s: float
    interference_s: float
    moved_bytes: int
    """Bytes over the link, both ways."""
    ilp_margin: float | None
    """The seconds by which the ILP's plan is faster, as a share of the in-core step. None if this plan does not fit."""
    wall_s: float
    """Seconds of deciding."""


def compare_policies(profile: Profile, made: Plan) -> tuple[ComparisonRow, ...]:
    """A row for each policy at the budget of ``made``, the ILP's plan. Fitting plans come first, the fastest first."""
    given = PolicyInput(Problem.of(profile, ranks=made.link.ranks), made.budget_bytes)

    def row(policy: str, does: Prediction, wall_s: float) -> ComparisonRow:
        figures = _figures(does, "interference_s")
        fits = does.covered_bytes(made.on) <= made.budget_bytes
        return ComparisonRow(
            **figures,
            policy=policy,
            fits=fits,
            moved_bytes=does.out_bytes + does.in_bytes,
            ilp_margin=does.overhead - made.prediction.overhead if fits else None,
            wall_s=wall_s,
        )

    rows = [row(ILP, made.prediction, made.solve.wall_s)]
    for name in policy_names():
        started_s = time.perf_counter()
        found = Optimum(run_policy(name, given), name)
        wall_s = time.perf_counter() - started_s
        written = write_plan(given, found, wall_s, is_laid_out=made.layout is not None, on=made.on)
        rows.append(row(name, written.prediction, wall_s))
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step_s if row.fits else row.peak_bytes)))
