"""What one value of the parameter takes: a profile of it, its bytes within the budget, and its plan; asked for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget


@dataclass(frozen=True)
class Effort:
    """How long each plan is searched for; see :func:`poochplan.plan`."""

    time_limit_s: float = 20.0
    gap: float = 0.005
    evaluations: int | None = None


@dataclass(frozen=True, eq=False)
class Sight:
    """One value as a profile shows it."""

    profile: Profile
    smallest_peak_bytes: int
    """No plan has a smaller peak."""

    @property
    def in_core_peak_bytes(self) -> int:
        return self.profile.in_core_peak_bytes


class Probes:
    """Profiles of values by one way to take them, what fits, and plans; state: what was seen, planned and refused."""

    def __init__(
        self,
        take: Callable[[int], Profile],
        budget_bytes: int,
        effort: Effort,
        most_overhead: float | None = None,
        *,
        exists: Callable[[int], bool] | None = None,
    ) -> None:
        """``exists`` says which values the workload takes; without it, those whose profile raises nothing."""
        self._take, self._exists = take, exists
        self.budget_bytes, self._effort, self._most_overhead = budget_bytes, effort, most_overhead
        self._seen: dict[int, Sight] = {}
        self._plans: dict[int, Plan] = {}
        self.refusals: dict[int, Exception] = {}
        """Values that the workload does not take, and what it said."""

    def sight(self, value: int) -> Sight:
        """The value's profile and bytes; raises what building or profiling it raises."""
        if value not in self._seen:
            found = self._take(value)
            self._seen[value] = Sight(found, smallest_budget(found))
        return self._seen[value]

    def plan(self, value: int) -> Plan:
        """The plan of the value within the budget; raises ``InfeasibleError`` where it has none."""
        if value not in self._plans:
            effort = self._effort
            self._plans[value] = plan(
                self.sight(value).profile,
                self.budget_bytes,
                time_limit_s=effort.time_limit_s,
                gap=effort.gap,
                evaluations=effort.evaluations,
            )
        return self._plans[value]

    def in_core(self, value: int) -> bool | None:
        """Whether the value fits with everything kept; None where the workload does not take it."""
        return self._asked(value, lambda: self.sight(value).in_core_peak_bytes <= self.budget_bytes)

    def has_plan(self, value: int) -> bool | None:
        """Whether some plan of the value fits, at any overhead."""
        return self._asked(value, lambda: self.sight(value).smallest_peak_bytes <= self.budget_bytes)

    def smallest(self, value: int) -> int | None:
        """Bytes of the smallest possible peak; None where the workload does not take the value."""
        return None if self.has_plan(value) is None else self.sight(value).smallest_peak_bytes

    def in_core_peak(self, value: int) -> int | None:
        """Bytes of the in-core peak; None where the workload does not take the value."""
        return None if self.has_plan(value) is None else self.sight(value).in_core_peak_bytes

    def fits(self, value: int) -> bool | None:
        """Whether a plan was found that fits, and within the overhead that is asked for."""
        if self._most_overhead is None or not self.has_plan(value):
            return self.has_plan(value)
        try:
            return self.plan(value).prediction.overhead <= self._most_overhead
        except InfeasibleError:
            return False

    def _asked(self, value: int, question: Callable[[], bool]) -> bool | None:
        if self._exists is not None:
            return question() if self._exists(value) else None
        if value in self.refusals:
            return None
        try:
            return question()
        except Exception as error:  # whatever a workload says to a value that it was not written for
            self.refusals[value] = error
            return None
