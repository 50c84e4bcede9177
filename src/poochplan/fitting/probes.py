"""Values of the parameter with their profiles and plans, each taken once; and the ladder of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.arena.reserved import in_core_bytes, is_reserved_known
from poochplan.planner.planning import plan, smallest_budget

from .family import Family

MOST_RUNGS = 8
"""Most powers of two in a ladder; of more, this many are taken evenly."""


class Probes:
    """Profiles of values, taken in one way, with the answers and plans. State: the profiles, plans and refusals so
    far.
    """

    def __init__(
        self,
        take: Callable[[int], Profile],
        budget_bytes: int,
        limits: Mapping[str, Any],
        most_overhead: float | None = None,
        *,
        exists: Callable[[int], bool] | None = None,
    ) -> None:
        """``limits``: of each plan's search, as for :func:`poochplan.plan`. ``exists`` says which values the workload
        takes; without it, those whose profile raises no error.
        """
        self._exists, self.budget_bytes, self._most_overhead = exists, budget_bytes, most_overhead
        self.profile = profile = cache(take)
        """The profile of a value; raises what building or profiling it raises."""
        self.least_bytes = cache(lambda value: smallest_budget(profile(value)))
        """No plan of a value has a smaller peak."""
        self.plan = cache(lambda value: plan(profile(value), budget_bytes, **limits))
        """The plan of a value within the budget; raises ``InfeasibleError`` if it has none."""
        self.refusals: dict[int, Exception] = {}
        """Values that the workload does not take, with its error."""

    def in_core(self, value: int) -> bool | None:
        """Whether the value fits with everything kept; None if the workload does not take it."""
        return self._asked(value, lambda: in_core_bytes(self.profile(value)) <= self.budget_bytes)

    def has_plan(self, value: int) -> bool | None:
        """Whether some plan of the value fits, at any overhead."""
        return self._asked(value, lambda: self.least_bytes(value) <= self.budget_bytes)

    def smallest(self, value: int) -> int | None:
        """Bytes of the smallest possible peak; None if the workload does not take the value."""
        return None if self.has_plan(value) is None else self.least_bytes(value)

    def in_core_peak(self, value: int) -> int | None:
        """Bytes of the in-core peak; None if the workload does not take the value."""
        return None if self.has_plan(value) is None else in_core_bytes(self.profile(value))

    def fits(self, value: int) -> bool | None:
        """Whether a plan was found that fits, and that is within the requested overhead."""
        has_plan = self.has_plan(value)
        if not has_plan or not self.is_searched(value):
            return has_plan
        try:
            made = self.plan(value)
            is_within = made.covered_bytes <= self.budget_bytes
            return is_within and (self._most_overhead is None or made.prediction.overhead <= self._most_overhead)
        except InfeasibleError:
            return False

    def is_searched(self, value: int) -> bool:
        """Whether only a plan tells if the value fits: for a requested overhead, or for reserved bytes."""
        return self._most_overhead is not None or is_reserved_known(self.profile(value))

    def _asked(self, value: int, question: Callable[[], bool]) -> bool | None:
        if self._exists is not None:
            return question() if self._exists(value) else None
        if value in self.refusals:
            return None
        try:
            return question()
        except Exception as error:  # a workload may raise anything for a value that it does not support
            self.refusals[value] = error
            return None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One value: its memory, and the figures of its plan within the memory."""

    value: int
    in_core_peak_bytes: int
    smallest_peak_bytes: int
    """No plan has a smaller peak."""
    fits: bool
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


def ladder_values(in_core: int | None, largest: int, smallest: int) -> tuple[int, ...]:
    """The largest in-core value, powers of two above it, and the largest value; from the smallest value if none is
    in-core.
    """
    first = smallest if in_core is None else in_core
    powers = [1 << exponent for exponent in range(largest.bit_length()) if first < 1 << exponent < largest]
    if len(powers) > MOST_RUNGS:
        powers = [powers[index * (len(powers) - 1) // (MOST_RUNGS - 1)] for index in range(MOST_RUNGS)]
    return tuple(sorted({first, *powers, largest}))


def bytes_of(value: int, probes: Probes, *, is_measured: bool) -> Rung:
    """A rung without a plan: the memory of the value."""
    return Rung(
        value=value,
        in_core_peak_bytes=probes.profile(value).in_core_peak_bytes,
        smallest_peak_bytes=probes.least_bytes(value),
        fits=False,
        is_measured=is_measured,
    )


def rung_at(family: Family, value: int, probes: Probes, *, is_measured: bool) -> Rung:
    """The value's rung; raises what profiling it raises."""
    bare = bytes_of(value, probes, is_measured=is_measured)
    if not probes.has_plan(value):
        return bare
    made = probes.plan(value)
    prediction = made.prediction
    return replace(
        bare,
        fits=bool(probes.fits(value)),
        in_core_step_s=prediction.in_core_step_s,
        step_s=prediction.step_s,
        overhead=prediction.overhead,
        bound_overhead=_bound_of(made),
        items_per_s=family.items(value) / prediction.step_s if prediction.step_s > 0 else None,
    )


def _bound_of(made: Plan) -> float | None:
    if made.solve.bound_s is None or made.prediction.in_core_step_s <= 0:
        return 0.0 if made.prediction.overhead <= 0 else None
    return made.solve.bound_s / made.prediction.in_core_step_s - 1
