"""Values of the parameter with their profiles and plans, each taken once; and the ladder of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.planner.arena.reserved import in_core_bytes, is_reserved_known
from poochplan.planner.planning import plan, smallest_budget

from .family import Family, Take

MOST_RUNGS = 8
"""Most powers of two in a ladder; of more, this many are taken evenly."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One value: its memory, and the figures of its plan within the memory."""

    value: int
    in_core_peak_bytes: int
    smallest_peak_bytes: int
    """No plan has a smaller peak."""
    fits: bool = False
    """Whether it has a plan within the memory and within ``max_overhead``."""
    in_core_step_s: float | None = None
    """This and all below: None if there is no plan within the memory."""
    step_s: float | None = None
    overhead: float | None = None
    bound_overhead: float | None = None
    """Proven: no plan within the memory has a smaller overhead. None if nothing is proven."""
    items_per_s: float | None = None
    """Throughput of the planned step, in units of ``Fit.unit``."""
    is_measured: bool = False
    """Whether real steps were profiled; otherwise the profile was taken without memory."""


@dataclass(eq=False)
class Probes:
    """Profiles of values, taken in one way, with their sizes and plans. State: all of these so far, and refusals."""

    family: Family
    take: Take
    budget_bytes: int
    limits: Mapping[str, Any]
    """Of each plan's search, as for :func:`poochplan.plan`."""
    most_overhead: float | None = None
    exists: Callable[[int], int | None] | None = None
    """Gives None for values that the workload does not take. Without it those are whose profile raises an error."""

    def __post_init__(self) -> None:
        self.profile = cache(self.take)
        """The profile of a value; raises what building or profiling it raises."""
        self.least_bytes = cache(lambda value: smallest_budget(self.profile(value)))
        """No plan of a value has a smaller peak."""
        self.plan = cache(lambda value: plan(self.profile(value), self.budget_bytes, **self.limits))
        """The plan of a value within the budget; raises ``InfeasibleError`` if it has none."""
        self.refusals: dict[int, Exception] = {}
        """Values that the workload does not take, with its error."""

    def smallest(self, value: int) -> int | None:
        """Bytes of the smallest possible peak; None if the workload does not take the value."""
        return self._asked(value, lambda: self.least_bytes(value))

    def in_core(self, value: int) -> int | None:
        """Bytes of what a budget covers with everything kept; None if the workload does not take the value."""
        return self._asked(value, lambda: in_core_bytes(self.profile(value)))

    def side(self, value: int) -> float | None:
        """On which side of any limit the value is, if only :meth:`fits` tells."""
        return None if self.smallest(value) is None else -math.inf if self.fits(value) else math.inf

    def fits(self, value: int) -> bool:
        """Whether a plan fits; if only a plan tells, whether one was found that is within the requested overhead."""
        if not self.is_searched(value):
            return self.least_bytes(value) <= self.budget_bytes
        made = self._made(value)
        if made is None or made.covered_bytes > self.budget_bytes:
            return False
        return self.most_overhead is None or made.prediction.overhead <= self.most_overhead

    def is_searched(self, value: int) -> bool:
        """Whether only a plan tells if the value fits: for a requested overhead, or for reserved bytes."""
        return self.most_overhead is not None or is_reserved_known(self.profile(value))

    def rung(self, value: int, *, is_measured: bool) -> Rung:
        """The value's rung; raises what profiling it raises."""
        bare = Rung(
            value=value,
            in_core_peak_bytes=self.profile(value).in_core_peak_bytes,
            smallest_peak_bytes=self.least_bytes(value),
            is_measured=is_measured,
        )
        made = self._made(value)
        if made is None:
            return bare
        prediction, bound_s, in_core_s = made.prediction, made.solve.bound_s, made.prediction.in_core_step_s
        return replace(
            bare,
            fits=self.fits(value),
            in_core_step_s=in_core_s,
            step_s=prediction.step_s,
            overhead=prediction.overhead,
            bound_overhead=None if bound_s is None or in_core_s <= 0 else bound_s / in_core_s - 1,
            items_per_s=self.family.items(value) / prediction.step_s if prediction.step_s > 0 else None,
        )

    def _made(self, value: int) -> Plan | None:
        try:
            return self.plan(value) if self.least_bytes(value) <= self.budget_bytes else None
        except InfeasibleError:
            return None

    def _asked(self, value: int, question: Callable[[], int]) -> int | None:
        if self.exists is not None:
            return None if self.exists(value) is None else question()
        if value in self.refusals:
            return None
        try:
            return question()
        except Exception as error:  # a workload may raise anything for a value that it does not support
            self.refusals[value] = error
            return None


def ladder_values(in_core: int | None, largest: int, smallest: int) -> tuple[int, ...]:
    """The largest in-core value, powers of two above it, and the largest value; from the smallest value if none is
    in-core.
    """
    first = smallest if in_core is None else in_core
    powers = [1 << exponent for exponent in range(largest.bit_length()) if first < 1 << exponent < largest]
    if len(powers) > MOST_RUNGS:
        powers = [powers[index * (len(powers) - 1) // (MOST_RUNGS - 1)] for index in range(MOST_RUNGS)]
    return tuple(sorted({first, *powers, largest}))
