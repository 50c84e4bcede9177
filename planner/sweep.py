"""The frontier of memory against overhead: every policy at every budget, each judged by the same simulator.

A cell of the sweep is one policy at one budget. Cells know nothing of each other, so they run in processes of their
own, with one solver thread each, and a cell that fails loses no other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Literal

from poochplan.formats.profile import Profile
from poochplan.planner.model.solvers import choose_solver
from poochplan.planner.policies.registry import unknown_policy
from poochplan.planner.problem.problem import build_problem

from .comparison import all_policies
from .planning import ILP, smallest_budget
from .sweep_cells import Solving, SweepPoint, solve_cell
from .sweep_processes import solve_in_processes

DEFAULT_POINTS = 9
Finished = Callable[[SweepPoint, int, int], None]
"""Called in the sweep's own process with each cell that is done, how many are, and how many there are."""


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
    solving = solving or Solving()
    budgets = default_budgets(profile, arena=solving.arena) if budgets is None else budgets
    names = all_policies() if policies is None else tuple(policies)
    for name in names:
        if name not in all_policies():
            raise unknown_policy(name)
    if ILP in names:
        choose_solver(solving.solver)
    build_problem(profile)
    cells = list(dict.fromkeys(itertools.product(names, budgets)))
    processes = min(processes or _usable_processors(), len(cells))
    tell = _Counted(finished, len(cells))
    if processes <= 1:
        found = {}
        for cell in cells:
            found[cell] = solve_cell(profile, solving, cell)
            tell(found[cell])
    else:
        found = solve_in_processes(profile, solving, cells, processes, tell)
    return [found[cell] for cell in cells]


def default_budgets(
    profile: Profile,
    points: int = DEFAULT_POINTS,
    most_bytes: int | None = None,
    *,
    arena: Literal["auto", "on", "off"] = "auto",
) -> tuple[int, ...]:
    """Evenly spaced bytes: from the smallest budget that has a plan to the in-core peak, or ``most_bytes`` if less."""
    first, last = smallest_budget(profile, arena=arena), profile.in_core_peak_bytes
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
