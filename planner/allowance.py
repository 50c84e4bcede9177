"""What ends a search: a clock, or counts that no clock decides.

Every stage of planning asks an :class:`Allowance` how far it may go; nothing else in the planner decides by the time.
Several threads may ask the same one.
"""

from __future__ import annotations

import time
from math import ceil, inf
from typing import Protocol

from poochplan.formats.plan import SolveStatus
from poochplan.planner.model.solvers import Limits

EVALUATIONS_AT_ONCE = 64
"""How many simulations a walk takes before it asks whether to go on."""
EVALUATIONS_PER_CHECK = 20
"""Where simulations are counted, the solver may ask once whether to go on for so many of them."""
EVALUATIONS_PER_SOLVE = 20
"""Where simulations are counted, so many are taken for each linear program that is solved again."""
MODEL_COLUMNS = 10_000
"""Where simulations are counted, a larger model is not solved with integrality: its root alone takes minutes."""


class Allowance(Protocol):
    """How much a search, or a stage of it, may still spend."""

    @property
    def status(self) -> SolveStatus:
        """What to say of a search that ends now and is not near its bound."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""

    @property
    def progress(self) -> float:
        """The share that is spent, from 0 to 1."""

    @property
    def left(self) -> float:
        """Seconds, or simulations."""

    @property
    def is_counted(self) -> bool:
        """Whether simulations are counted."""

    def spend(self, evaluations: int = 1) -> bool:
        """Takes so many simulations; whether they were there."""

    def at_once(self) -> int:
        """How many simulations to take before asking again."""

    def part(self, share: float, evaluations: float = inf) -> Allowance:
        """A stage: so much of what is left, and at most so many simulations, taken from this one."""

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        """What one run of a solver may take of what is left."""

    def stop(self) -> None:
        """From now on it is spent, and so are its parts."""


class TimeAllowance:
    """So many seconds from now on."""

    def __init__(self, limit_s: float, whole: TimeAllowance | None = None, evaluations: float = inf) -> None:
        self._limit_s, self._whole = limit_s, whole
        self._evaluations = self._evaluations_left = evaluations
        self._began_s = time.perf_counter()
        self._is_stopped = False

    is_counted = False

    @property
    def left(self) -> float:
        return 0.0 if self._is_ended else self._limit_s - (time.perf_counter() - self._began_s)

    @property
    def _is_ended(self) -> bool:
        """Whether it was stopped, or what it is a part of."""
        return self._is_stopped or (self._whole is not None and self._whole._is_ended)

    @property
    def progress(self) -> float:
        if self.is_spent or self._limit_s <= 0:
            return 1.0
        spent = 0.0 if self._evaluations == inf else 1.0 - self._evaluations_left / self._evaluations
        return max(spent, 1.0 - self.left / self._limit_s)

    @property
    def status(self) -> SolveStatus:
        if self._is_stopped:
            return SolveStatus.INTERRUPTED
        return SolveStatus.TIME_LIMIT if self.is_spent else SolveStatus.SEARCHED

    @property
    def is_spent(self) -> bool:
        is_over = self.left <= 0 or self._evaluations_left <= 0
        return is_over or (self._whole is not None and self._whole.is_spent)

    def spend(self, evaluations: int = 1) -> bool:
        self._evaluations_left -= evaluations
        return not self.is_spent

    def at_once(self) -> int:
        return EVALUATIONS_AT_ONCE

    def part(self, share: float, evaluations: float = inf) -> TimeAllowance:
        return TimeAllowance(max(0.0, self.left * share), self, evaluations)

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        return Limits(max(0.1, self.left * share), gap, absolute_gap)

    def stop(self) -> None:
        self._is_stopped = True


class CountAllowance:
    """So many simulations, however long they take."""

    def __init__(self, evaluations: int, whole: CountAllowance | None = None) -> None:
        self._evaluations = self._left = evaluations
        self._whole = whole
        self._is_stopped = False

    is_counted = True

    @property
    def left(self) -> float:
        return 0.0 if self._is_ended else float(self._left)

    @property
    def _is_ended(self) -> bool:
        """Whether it was stopped, or what it is a part of."""
        return self._is_stopped or (self._whole is not None and self._whole._is_ended)

    @property
    def progress(self) -> float:
        return 1.0 if self.is_spent else 1.0 - self._left / self._evaluations

    @property
    def status(self) -> SolveStatus:
        if self._is_stopped:
            return SolveStatus.INTERRUPTED
        return SolveStatus.EVALUATION_LIMIT if self.is_spent else SolveStatus.SEARCHED

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or (self._whole is not None and self._whole.is_spent)

    def spend(self, evaluations: int = 1) -> bool:
        self._left -= evaluations
        from_whole = self._whole is None or self._whole.spend(evaluations)
        return self._left >= 0 and from_whole and not self._is_stopped

    def at_once(self) -> int:
        return int(max(1, min(EVALUATIONS_AT_ONCE, self.left)))

    def part(self, share: float, evaluations: float = inf) -> CountAllowance:
        return CountAllowance(ceil(min(max(0, self._left) * share, evaluations)), self)

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        checks = ceil(max(0.0, self.left) * share / EVALUATIONS_PER_CHECK)
        return Limits(inf, gap, absolute_gap, most_checks=checks, most_columns=MODEL_COLUMNS)

    def stop(self) -> None:
        self._is_stopped = True


class Budget:
    """What one stage may still spend: simulations, as long as the allowance that they are taken from lasts."""

    def __init__(self, evaluations: int, allowance: Allowance | None = None) -> None:
        self.left = evaluations
        self._allowance = allowance

    def spend(self) -> bool:
        """Takes one simulation; whether there was one."""
        self.left -= 1
        return self.left >= 0 and (self._allowance is None or self._allowance.spend())
