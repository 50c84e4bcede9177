"""A candidate plan: who proposed the decisions, the schedule made of them, and what the simulator says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poochplan.formats.plan import Decision
from poochplan.planner.problem.problem import Problem
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.schedule import AS_STYLED, Schedule, Style, Tuning
from poochplan.planner.simulator.simulate import Simulation, simulate

SWAP_ALL_ON_DEMAND = "swap-all on demand"
ON_DEMAND = Style(release="early", prefetch="on_demand")
STYLES = (Style(), Style(in_order=False), Style(release="early"))


@dataclass(frozen=True, eq=False)
class Candidate:
    """One plan that was tried: who proposed the decisions, the schedule, and what it does."""

    policy: str
    wish: tuple[Decision, ...]
    """The decisions asked for; the schedule keeps swapped values that need no release."""
    schedule: Schedule
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        return max(self.simulation.peak_bytes, self.simulation.first_step_peak_bytes)

    def rank(self, budget_bytes: int) -> tuple[int, float, int]:
        """Smaller is better: bytes over budget, then step time, then bytes moved."""
        simulation = self.simulation
        moved = simulation.out_bytes + simulation.in_bytes
        return max(0, self.peak_bytes - budget_bytes), simulation.step_s, moved


def simulated(problem: Problem, policy: str, schedule: Schedule) -> Candidate:
    """A schedule that is there, simulated."""
    return Candidate(policy, schedule.decisions, schedule, simulate(problem, schedule))


def movable(problem: Problem) -> list[int]:
    """Saved values that may be something else than kept."""
    return [value for value, reason in enumerate(problem.must_keep) if not reason]


def try_style(
    problem: Problem,
    policy: str,
    wish: Sequence[Decision],
    budget_bytes: int,
    style: Style,
    tuning: Tuning = AS_STYLED,
    *,
    recorded: bool = True,
) -> Candidate:
    """Decisions, scheduled in one style and simulated; ``recorded`` as in ``fit``."""
    schedule = fit(problem, wish, budget_bytes, style, tuning, recorded=recorded)
    return Candidate(policy, tuple(wish), schedule, simulate(problem, schedule))


def try_decisions(
    problem: Problem, policy: str, wish: Sequence[Decision], budget_bytes: int, styles: Sequence[Style] = STYLES
) -> Candidate:
    """Decisions, scheduled in each style; the best of them."""
    tried = [try_style(problem, policy, wish, budget_bytes, style) for style in styles]
    return min(tried, key=lambda candidate: candidate.rank(budget_bytes))


def swap_all(problem: Problem) -> tuple[Decision, ...]:
    """Every value that may be swapped is."""
    return tuple(Decision.KEEP if reason else Decision.SWAP for reason in problem.must_keep)


def swap_all_on_demand(problem: Problem) -> Candidate:
    """Every value leaves as soon as it can and comes back when it is used.

    Each saved value is live in its forward life and from its first use to its last, as it is in every plan: no plan of
    this planner has a smaller peak.
    """
    return try_style(problem, SWAP_ALL_ON_DEMAND, swap_all(problem), 0, ON_DEMAND)


def least_step_s(problem: Problem, wish: Sequence[Decision]) -> float:
    """No schedule of these decisions has a shorter step: what backward uses of the recomputed runs, each op once."""
    ops: set[int] = set()
    for value, decision in enumerate(wish):
        replay = problem.replay.replays[value]
        if decision is Decision.RECOMPUTE and replay is not None and problem.first_use_point[value] >= 0:
            ops.update(replay.ops)
    added_s = sum(problem.replay.op_seconds[op] for op in sorted(ops))
    if problem.launch_cost is not None and problem.launch_cost.is_compute:
        added_s += problem.launch_cost.replay_s * len(ops)
    return max(problem.step_s + added_s, problem.keep_all_s)
