"""What ends a search: a clock, or counts that no clock decides.

Every stage of planning asks an :class:`Allowance` how far it may go; nothing else in the planner decides by the time.
"""

from __future__ import annotations

import time
from math import ceil, inf
from typing import Protocol

from .solvers import Limits

LARGEST_PART = 0.5
"""Of a count that is left, no stage takes more than this: nothing else leaves any of it to the next."""
EVALUATIONS_PER_CHECK = 20
"""Where simulations are counted, the solver may ask once whether to go on for so many of them."""
MODEL_COLUMNS = 10_000
"""Where simulations are counted, a larger model is not solved with integrality: its root alone takes minutes."""


class Allowance(Protocol):
    """How much a search may still spend."""

    @property
    def status(self) -> str:
        """What to say of a search that ends now and is not near its bound."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""

    def affords(self, evaluations: int) -> bool:
        """Whether there is room for something that takes about so many simulations, which are not taken from this."""

    def spend(self) -> bool:
        """Takes one simulation; whether there was one."""

    def part(self, share: float, least: float) -> Allowance:
        """Another one beside this one: so much of what this one was at first, and at least ``least`` seconds."""

    def stage(self, evaluations: int, share: float = 1.0) -> Budget:
        """What one stage may take: so many simulations, and no more than that share of what is left."""

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        """What one run of a solver may take of what is left."""


class TimeAllowance:
    """So many seconds from now on."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline_s = time.perf_counter() + limit_s

    @property
    def _left_s(self) -> float:
        return self._deadline_s - time.perf_counter()

    @property
    def status(self) -> str:
        return "time limit" if self.is_spent else "searched"

    @property
    def is_spent(self) -> bool:
        return self._left_s <= 0

    def affords(self, evaluations: int) -> bool:
        return not self.is_spent

    def spend(self) -> bool:
        return not self.is_spent

    def part(self, share: float, least: float) -> TimeAllowance:
        return TimeAllowance(max(least, share * self._limit_s))

    def stage(self, evaluations: int, share: float = 1.0) -> Budget:
        return Budget(evaluations, TimeAllowance(self._left_s * share))

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        return Limits(max(0.5, self._left_s * share), gap, absolute_gap)


class CountAllowance:
    """So many simulations, however long they take."""

    def __init__(self, evaluations: int) -> None:
        self._evaluations = self._left = evaluations

    @property
    def status(self) -> str:
        return "evaluation limit" if self.is_spent else "searched"

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def affords(self, evaluations: int) -> bool:
        return self._left >= evaluations

    def spend(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def part(self, share: float, least: float) -> CountAllowance:
        return CountAllowance(ceil(share * self._evaluations))

    def stage(self, evaluations: int, share: float = 1.0) -> Budget:
        return Budget(min(evaluations, self._share(share)), self)

    def limits(self, share: float = 1.0, *, gap: float = 0.005, absolute_gap: float = 0.0) -> Limits:
        checks = ceil(self._share(share) / EVALUATIONS_PER_CHECK)
        return Limits(inf, gap, absolute_gap, most_checks=checks, most_columns=MODEL_COLUMNS)

    def _share(self, share: float) -> int:
        return ceil(max(0, self._left) * min(share, LARGEST_PART))


class Budget:
    """What one stage may still spend: simulations, as long as the allowance that they are taken from lasts."""

    def __init__(self, evaluations: int, allowance: Allowance | None = None) -> None:
        self.left = evaluations
        self._allowance = allowance

    def spend(self) -> bool:
        """Takes one simulation; whether there was one."""
        self.left -= 1
        return self.left >= 0 and (self._allowance is None or self._allowance.spend())
