"""The frontier of memory against overhead: every policy at every budget, each judged by the same simulator.

A cell of the sweep is one policy at one budget. Cells know nothing of each other, so they run in processes of their
own, with one solver thread each, and a cell that fails loses no other.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.judge.candidate import Candidate
from poochplan.planner.model.solvers import choose_solver
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.policies.registry import unknown_policy
from poochplan.planner.problem.problem import Problem, build_problem

from .comparison import all_policies
from .planning import ILP, plan, smallest_budget

INFEASIBLE = "infeasible"
FAILED = "failed: "
STOPPED = ("time limit", "no solution found")
DEFAULT_POINTS = 9
Cell = tuple[str, int]
"""A policy and a budget in bytes."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """What one policy's plan does within one budget; all figures are the simulator's."""

    policy: str
    budget_bytes: int
    feasible: bool
    """Whether the policy found a plan within the budget."""
    peak_bytes: int | None = None
    """Most live bytes; the least that the policy came down to where it found no plan. None for a cell that failed."""
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
    status: str
    """The solver's status, ``fits``, ``infeasible``, or ``failed: `` and why."""

    @property
    def failed(self) -> bool:
        """Whether there is no answer for this cell."""
        return self.status.startswith(FAILED)

    @property
    def stopped(self) -> bool:
        """Whether the solver ran out of time; the plan is the best one found."""
        return self.status in STOPPED


Finished = Callable[[SweepPoint, int, int], None]
"""Called in the sweep's own process with each cell that is done, how many are, and how many there are."""


@dataclass(frozen=True)
class Solving:
    """How each cell is solved."""

    solver: str | None = None
    time_limit_s: float = 60.0
    gap: float = 0.005


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
    budgets: bytes; :func:`default_budgets` when None.
    policies: names of ``comparison.all_policies``; all of them when None.
    processes: how many cells run at a time; as many as this process has cores when None. With 1 they run in this
        process; otherwise the calling script needs the usual ``if __name__ == "__main__":``.
    finished: called with each cell as it is done, in any order. When the sweep is interrupted the processes are ended
        and the interrupt is raised again, so this is where what was finished is known.

    Raises
    ------
    UsageError
        A policy or the solver is unknown.
    PoochError
        The profile cannot be planned at all.
    """
    budgets = default_budgets(profile) if budgets is None else budgets
    names = all_policies() if policies is None else tuple(policies)
    for name in names:
        if name not in all_policies():
            raise unknown_policy(name)
    solving = solving or Solving()
    if ILP in names:
        choose_solver(solving.solver)
    build_problem(profile)
    cells = list(dict.fromkeys(itertools.product(names, budgets)))
    processes = min(processes or _usable_processors(), len(cells))
    tell = _Counted(finished, len(cells))
    if processes <= 1:
        found = {}
        for cell in cells:
            found[cell] = _solve(profile, solving, cell)
            tell(found[cell])
    else:
        found = _in_processes(profile, solving, cells, processes, tell)
    return [found[cell] for cell in cells]


def default_budgets(profile: Profile, points: int = DEFAULT_POINTS, most_bytes: int | None = None) -> tuple[int, ...]:
    """Evenly spaced bytes: from the smallest budget that has a plan to the in-core peak, or ``most_bytes`` if less."""
    first, last = smallest_budget(profile), profile.in_core_peak_bytes
    last = max(first, last if most_bytes is None else min(last, most_bytes))
    steps = max(1, points - 1)
    return tuple(dict.fromkeys(first + (last - first) * index // steps for index in range(steps + 1)))


def _usable_processors() -> int:
    """Those that this process may use, where the system tells (Linux); else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Counted:
    """Tells the caller of each cell that is done, and how many are."""

    def __init__(self, finished: Finished | None, total: int) -> None:
        self._finished, self._total, self._done = finished, total, 0

    def __call__(self, point: SweepPoint) -> None:
        self._done += 1
        if self._finished is not None:
            self._finished(point, self._done, self._total)


# -- one cell ------------------------------------------------------------------------------------------------------


def _solve(profile: Profile, solving: Solving, cell: Cell) -> SweepPoint:
    """The cell's point; whatever goes wrong is in its status."""
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
            )
            return _of_plan(made, time.perf_counter() - started_s)
        given = PolicyInput.of(profile, budget_bytes)
        candidate = run_policy(policy, given)
        return _of_candidate(given.problem, candidate, cell, time.perf_counter() - started_s)
    except InfeasibleError as error:
        return _infeasible(cell, error.smallest_budget_bytes, time.perf_counter() - started_s)
    except Exception as error:
        return _failed(cell, f"{type(error).__name__}: {' '.join(str(error).split())}", time.perf_counter() - started_s)


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
        overhead=simulation.step_s / problem.step_s - 1 if problem.step_s > 0 else 0.0,
        stall_s=simulation.stall_s,
        replay_s=simulation.replay_s,
        out_bytes=simulation.out_bytes,
        in_bytes=simulation.in_bytes,
        wall_s=wall_s,
        status="fits",
    )


def _infeasible(cell: Cell, peak_bytes: int, wall_s: float) -> SweepPoint:
    policy, budget_bytes = cell
    return SweepPoint(
        policy=policy,
        budget_bytes=budget_bytes,
        feasible=False,
        peak_bytes=peak_bytes,
        wall_s=wall_s,
        status=INFEASIBLE,
    )


def _failed(cell: Cell, why: str, wall_s: float = 0.0) -> SweepPoint:
    return SweepPoint(policy=cell[0], budget_bytes=cell[1], feasible=False, wall_s=wall_s, status=f"{FAILED}{why}")


# -- processes -----------------------------------------------------------------------------------------------------

GRACE_S = 2.0
"""How long a process that was told to end may take."""
_given: tuple[Profile, Solving]
"""What every cell of a worker process needs, sent once."""


def _begin(profile: Profile, solving: Solving) -> None:
    global _given
    _given = profile, solving
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for cells for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _solve_given(cell: Cell) -> SweepPoint:
    return _solve(*_given, cell)


def _in_processes(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: _Counted
) -> dict[Cell, SweepPoint]:
    """All cells; those that were lost with a process that died are tried again, each in a process of its own."""
    slow_first = sorted(cells, key=lambda cell: cell[0] != ILP)
    found = _in_pool(profile, solving, slow_first, processes, tell)
    for cell in cells:
        if cell not in found:
            found |= _in_pool(profile, solving, [cell], 1, tell)
        if cell not in found:
            found[cell] = _failed(cell, "its process died, perhaps of too little memory")
            tell(found[cell])
    return found


def _in_pool(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: _Counted
) -> dict[Cell, SweepPoint]:
    """The cells whose process lived; an interrupt ends the processes and is raised again."""
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
        # Not ``is_alive``: while the pool's own thread collects the exit code, it says yes of a process that has ended.
        if not multiprocessing.connection.wait([worker.sentinel], timeout=GRACE_S):
            worker.kill()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see the terminal's interrupt: it comes to the one that ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
