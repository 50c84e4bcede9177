"""What a search may spend, when it stops, and the progress that it reports.

Every stage of planning asks an :class:`Allowance` how far it may go; nothing else in the planner depends on time.
Several threads may use the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import TypeAlias

from poochplan.errors import UsageError
from poochplan.formats.plan import SolveStatus
from poochplan.planner.search.solvers import SolverLimits

EVALUATIONS_AT_ONCE = 64
"""Number of simulations that a walk takes before it checks its allowance."""
EVALUATIONS_PER_CHECK = 20
"""If simulations are counted, the solver may check its allowance once for this many of them."""
EVALUATIONS_PER_SOLVE = 20
"""If simulations are counted, each further linear program that is solved counts as this many."""
MODEL_COLUMNS = 10_000
"""If simulations are counted, a larger model is not solved with integrality: its root alone takes minutes."""


class Allowance:
    """State: the rest that a search, or a stage of it, may spend: seconds from now on, or simulations however long they
    take (these are counted). A stage in seconds may be limited in simulations too.
    """

    def __init__(self, limit_s: float = inf, evaluations: float = inf, whole: Allowance | None = None) -> None:
        self._limit_s, self._whole = limit_s, whole
        self._evaluations = self._evaluations_left = evaluations
        self._began_s = time.perf_counter()
        self._is_stopped = False
        self.is_counted = limit_s == inf

    @property
    def left(self) -> float:
        """Seconds or simulations left; 0 if it was stopped, or its parent was."""
        if self._is_ended:
            return 0.0
        return self._evaluations_left if self.is_counted else self._limit_s - (time.perf_counter() - self._began_s)

    @property
    def _is_ended(self) -> bool:
        return self._is_stopped or (self._whole is not None and self._whole._is_ended)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left of it, or of its parent."""
        is_over = self.left <= 0 or self._evaluations_left <= 0
        return is_over or (self._whole is not None and self._whole.is_spent)

    @property
    def progress(self) -> float:
        """The spent share, from 0 to 1."""
        if self.is_spent:
            return 1.0
        counted = 0.0 if self._evaluations == inf else 1.0 - self._evaluations_left / self._evaluations
        return counted if self.is_counted else max(counted, 1.0 - self.left / self._limit_s)

    @property
    def status(self) -> SolveStatus:
        """Status of a search that ends now and is not near its bound."""
        if self._is_stopped:
            return SolveStatus.INTERRUPTED
        if not self.is_spent:
            return SolveStatus.SEARCHED
        return SolveStatus.EVALUATION_LIMIT if self.is_counted else SolveStatus.TIME_LIMIT

    def spend(self, evaluations: int = 1) -> bool:
        """Takes that many simulations from it and its parents. Returns whether they were available."""
        self._evaluations_left -= evaluations
        from_whole = self._whole is None or self._whole.spend(evaluations)
        return self._evaluations_left >= 0 and self.left >= 0 and from_whole and not self._is_stopped

    def at_once(self) -> int:
        """Number of simulations to take before the next check."""
        return int(max(1, min(EVALUATIONS_AT_ONCE, self.left))) if self.is_counted else EVALUATIONS_AT_ONCE

    def part(self, share: float, evaluations: float = inf) -> Allowance:
        """A stage with that share of the rest, and at most that many simulations."""
        left = max(0.0, self.left * share)
        if self.is_counted:
            return Allowance(evaluations=ceil(min(left, evaluations)), whole=self)
        return Allowance(left, evaluations, self)

    def limits(self, *, gap: float = 0.005, absolute_gap: float = 0.0) -> SolverLimits:
        """What one solver run may take of the rest."""
        if not self.is_counted:
            return SolverLimits(max(0.1, self.left), gap, absolute_gap)
        checks = ceil(max(0.0, self.left) / EVALUATIONS_PER_CHECK)
        return SolverLimits(inf, gap, absolute_gap, most_checks=checks, most_columns=MODEL_COLUMNS)

    def stop(self) -> None:
        """An interrupt: from now on it is spent, and so are its parts."""
        self._is_stopped = True

    def end(self) -> None:
        """From now on it is spent, as if its limit were reached."""
        self._evaluations_left = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a search has come."""

    step_s: float
    """Seconds of the best plan within the budget so far; infinite before there is one."""
    bound_s: float
    """No plan within the budget has a shorter step."""
    overhead: float
    """Overhead of the best plan, as a share of the in-core step."""
    gap: float
    """Distance of the best plan to the bound, as a share of the bound."""
    left: float
    """Seconds, or simulations if these are counted, until the search ends at the latest."""
    is_counted: bool


SearchCallback: TypeAlias = Callable[[Progress], bool | None]
"""Called from time to time, in the thread that asked for the plan. The search ends once it returns True."""


@dataclass(frozen=True)
class SearchLimits:
    """How long to search, and when to stop; :func:`~poochplan.plan` describes the same arguments."""

    solver: str | None = None
    time_limit_s: float = 20.0
    gap: float = 0.005
    threads: int = 2
    host_bytes: int | None = None
    evaluations: int | None = None
    """Number of simulations that walks, descents and polishing may take, in place of the time limit. The plan is then a
    pure function of profile, budget and effort, however long it takes. Starting points of walks and simulations of
    other policies are additional."""
    seed: int = 0
    keeps_interrupted: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"seed: expected at least 0, found {self.seed}")
        if self.evaluations is None:
            return
        if self.evaluations < 1:
            raise UsageError(f"evaluations: expected at least 1, found {self.evaluations}")
        if self.threads > 1:
            raise UsageError(
                f"threads: expected 1 with evaluations, found {self.threads}: what a second thread proves in time "
                "depends on the machine; leave threads out, or evaluations"
            )

    def allowance(self) -> Allowance:
        """What the search may spend, from now on."""
        if self.evaluations is not None:
            return Allowance(evaluations=self.evaluations)
        return Allowance(max(0.0, self.time_limit_s))
