"""How long to search for a plan, and when to stop; and what a search says of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from poochplan.errors import UsageError

from .allowance import Allowance, CountAllowance, TimeAllowance


@dataclass(frozen=True)
class Progress:
    """How far a search has come."""

    step_s: float
    """Of the best plan within the budget so far; infinite before there is one."""
    bound_s: float
    """No plan within the budget has a shorter step."""
    overhead: float
    """Of the best plan, as a share of the in-core step."""
    gap: float
    """Of the best plan to the bound, as a share of it."""
    left: float
    """Seconds, or where simulations are counted so many of them, until the search ends at the latest."""
    is_counted: bool


Watch: TypeAlias = Callable[[Progress], None]
"""Is told now and then, in the thread that asked for the plan."""


@dataclass(frozen=True)
class Effort:
    """How long to search, and when to stop."""

    solver: str | None = None
    time_limit_s: float = 20.0
    gap: float = 0.005
    """The search ends when the step is within this share of the proven bound."""
    threads: int = 2
    host_bytes: int | None = None
    evaluations: int | None = None
    """Simulations that walks, descents and polishing may take, in place of the time limit: the plan is then a pure
    function of profile, budget and effort, however long it takes. Where walks begin, and what other policies
    simulate, comes on top."""
    seed: int = 0
    """Of the random walks."""
    keeps_interrupted: bool = False
    """Whether an interrupt (Ctrl-C) ends the search with the best plan so far; else it is raised."""

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

    def allowance(self, spent_s: float = 0.0) -> Allowance:
        """What the search may spend, from now on; ``spent_s`` seconds of the time limit are gone."""
        if self.evaluations is not None:
            return CountAllowance(self.evaluations)
        return TimeAllowance(max(0.0, self.time_limit_s - spent_s))
