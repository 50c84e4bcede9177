"""plan(): a Profile and a budget in, a Plan out."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..errors import InfeasibleError
from ..profiler.schema import PointKind, Profile
from ..units import format_bytes, parse_budget
from .candidate import Candidate, movable, swap_all_on_demand, try_decisions
from .ilp import Solution, solve_fluid
from .policies import PolicyInput, run_policy
from .problem import Problem, build_problem
from .schedule import keep_all
from .schema import Decision, Plan, PlannedValue, Prediction, Solve
from .search import improve
from .simple import simple_plans
from .simulate import simulate

ILP = "ilp"
"""The policy that plans unless another is asked for."""
HOST_ALIGNMENT_BYTES = 4096
TINY_SHARE = 0.005
"""Values that together hold less than this share of the saved bytes are kept, where the budget has room for them."""
MAX_ROUNDS = 3
ROUND_MARGIN = 0.015
"""Share of the budget taken off the model in each further round."""
LATER_ROUND_LIMIT_S = 5.0
WORTH_ANOTHER_ROUND = 0.002
"""Share of the step that the simulated overhead must lose against the fluid one for another round."""
STARTS = 3
"""How many of the best plans local search starts from."""
ABSOLUTE_GAP = 0.1
"""The solver also stops at this fraction of the gap, taken of the whole step instead of the overhead."""
EXTRA_TIGHTENING = 0.002
"""Share of the budget by which a violated row is tightened beyond its violation."""


@dataclass(frozen=True)
class _Search:
    """What came out of the search for one budget."""

    best: Candidate
    solution: Solution | None
    rounds: int
    tiny: frozenset[int]
    notes: tuple[str, ...]
    policy: str = ""
    """The policy that decided alone; empty for the ILP and what stands beside it."""


def plan(
    profile: Profile,
    budget: str | int | float,
    *,
    solver: str | None = None,
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    threads: int = 2,
    workload: str | None = None,
    policy: str = ILP,
) -> Plan:
    """The plan with the least simulated step time that was found within ``budget``.

    ``budget`` is bytes, text such as ``"8GiB"``, or a share of the in-core peak such as ``"60%"``; ``gap`` is the
    relative gap at which the solver stops. ``workload`` replaces the profile's name of the workload. Any ``policy`` but
    ``"ilp"`` decides alone: no solver, no local search.

    Raises
    ------
    InfeasibleError
        No plan fits, or not the policy's; it names the smallest budget that has a plan.
    UsageError
        The budget cannot be read, the solver is not there, or the policy is unknown.
    """
    started_s = time.perf_counter()
    budget_bytes = parse_budget(budget, profile.in_core_peak_bytes)
    problem = build_problem(profile)
    if policy != ILP:
        found = _alone(policy, profile, problem, budget_bytes)
        return _plan_of(profile, problem, found, budget_bytes, workload, time.perf_counter() - started_s)
    in_core = Candidate(
        "keep-all", keep_all(problem).decisions, keep_all(problem), simulate(problem, keep_all(problem))
    )
    if in_core.peak_bytes <= budget_bytes:
        note = (
            f"the budget of {format_bytes(budget_bytes)} holds the in-core peak of "
            f"{format_bytes(in_core.peak_bytes)}: everything is kept"
        )
        found = _Search(in_core, None, 0, frozenset(), (note,))
    else:
        _check_feasible(profile, problem, budget_bytes)
        found = _search(problem, budget_bytes, solver, time_limit_s, gap, threads)
    return _plan_of(profile, problem, found, budget_bytes, workload, time.perf_counter() - started_s)


def smallest_budget(profile: Profile) -> int:
    """Bytes of the smallest budget that has a plan: the peak with every value away except where it must be live."""
    return swap_all_on_demand(build_problem(profile)).peak_bytes


def _check_feasible(profile: Profile, problem: Problem, budget_bytes: int) -> None:
    smallest = swap_all_on_demand(problem)
    if smallest.peak_bytes <= budget_bytes:
        return
    share = share_that_holds(smallest.peak_bytes, profile.in_core_peak_bytes)
    where = f" at {smallest.simulation.peak_layer}" if smallest.simulation.peak_layer else ""
    raise InfeasibleError(
        f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}): expected at least "
        f"{smallest.peak_bytes} bytes ({format_bytes(smallest.peak_bytes)}, {share} of the in-core peak of "
        f"{format_bytes(profile.in_core_peak_bytes)}), which{where} no decision can lower; "
        f"pass a budget of {share} or more, or make the batch smaller",
        smallest_budget_bytes=smallest.peak_bytes,
    )


def _alone(policy: str, profile: Profile, problem: Problem, budget_bytes: int) -> _Search:
    """The plan of one policy, as it is."""
    best = run_policy(policy, PolicyInput(profile, problem, budget_bytes))
    if best.peak_bytes > budget_bytes:
        _check_feasible(profile, problem, budget_bytes)
        smallest_bytes = swap_all_on_demand(problem).peak_bytes
        raise InfeasibleError(
            f"the plan of policy {policy!r} does not fit a budget of {budget_bytes} bytes "
            f"({format_bytes(budget_bytes)}): its peak is {best.peak_bytes} bytes ({format_bytes(best.peak_bytes)}, "
            f"{share_that_holds(best.peak_bytes, profile.in_core_peak_bytes)} of the in-core peak); raise the budget, "
            f"or take policy {ILP!r}, which has plans from "
            f"{share_that_holds(smallest_bytes, profile.in_core_peak_bytes)} on",
            smallest_budget_bytes=smallest_bytes,
        )
    return _Search(best, None, 0, frozenset(), (), policy)


def share_that_holds(size_bytes: int, in_core_peak_bytes: int) -> str:
    """The smallest share, in hundredths of a percent, that ``parse_budget`` reads as at least ``size_bytes``."""
    hundredths = max(1, size_bytes * 10000 // in_core_peak_bytes)
    while parse_budget(f"{hundredths / 100:.2f}%", in_core_peak_bytes) < size_bytes:
        hundredths += 1
    return f"{hundredths / 100:.2f}%"


def _search(
    problem: Problem, budget_bytes: int, solver: str | None, time_limit_s: float, gap: float, threads: int
) -> _Search:
    tiny = _tiny(problem, budget_bytes)
    tried = list(simple_plans(problem, budget_bytes))
    solved, solution, rounds = _solve_rounds(problem, budget_bytes, tiny, solver, time_limit_s, gap, threads)
    tried += solved
    tried.sort(key=lambda candidate: candidate.rank(budget_bytes))
    improved = [improve(problem, candidate, budget_bytes) for candidate in _distinct(tried)[:STARTS]]
    best = min(improved, key=lambda candidate: _rank(problem, candidate, budget_bytes))
    return _Search(best, solution, rounds, tiny, _notes(best, solution))


def _solve_rounds(
    problem: Problem,
    budget_bytes: int,
    tiny: frozenset[int],
    solver: str | None,
    time_limit_s: float,
    gap: float,
    threads: int,
) -> tuple[list[Candidate], Solution, int]:
    """Plans of the ILP, the solution for the full budget, and how often it was solved.

    It is solved again with tighter rows where the simulated peak is over budget, and for a slightly smaller budget
    where the simulated step is slower than the fluid one: whole values need more room than fluid ones.
    """
    deadline_s = time.perf_counter() + time_limit_s
    candidates = [value for value in movable(problem) if value not in tiny]
    tightened: dict[int, int] = {}
    solutions: list[Solution] = []
    found: list[Candidate] = []
    model_budget_bytes = budget_bytes
    limit_s = time_limit_s
    for _ in range(MAX_ROUNDS):
        solution = solve_fluid(
            problem,
            model_budget_bytes,
            candidates,
            solver=solver,
            time_limit_s=min(limit_s, max(1.0, deadline_s - time.perf_counter())),
            gap=gap,
            absolute_gap_s=ABSOLUTE_GAP * gap * problem.step_s,
            threads=threads,
            tightened=tightened,
        )
        solutions.append(solution)
        limit_s = LATER_ROUND_LIMIT_S
        if solution.decisions is None or solution.objective_s is None:
            break
        found.append(try_decisions(problem, "ilp", solution.decisions, budget_bytes))
        lost_s = found[-1].simulation.step_s - problem.step_s - solution.objective_s
        if found[-1].peak_bytes > budget_bytes:
            _tighten(tightened, found[-1], budget_bytes)
        elif lost_s > WORTH_ANOTHER_ROUND * problem.step_s:
            model_budget_bytes -= int(budget_bytes * ROUND_MARGIN)
        else:
            break
        if time.perf_counter() > deadline_s:
            break
    return found, solutions[0], len(solutions)


def _distinct(ranked: list[Candidate]) -> list[Candidate]:
    """The candidates without those whose schedule does what a better one's does."""
    kept: dict[tuple[Decision, ...], Candidate] = {}
    for candidate in ranked:
        kept.setdefault(candidate.schedule.decisions, candidate)
    return list(kept.values())


def _rank(problem: Problem, candidate: Candidate, budget_bytes: int) -> tuple[int, int, bool, int]:
    """As :meth:`Candidate.rank`, but between plans of the same speed to a millionth of the step the ILP's is taken."""
    over, step_s, moved = candidate.rank(budget_bytes)
    return over, round(step_s / problem.step_s * 1e6) if problem.step_s > 0 else 0, candidate.policy != "ilp", moved


def _notes(best: Candidate, solution: Solution) -> tuple[str, ...]:
    if best.policy == "ilp":
        return ()
    why = f"the solver ended with {solution.status!r}" if solution.decisions is None else "it simulated faster"
    return (f"the plan is not the ILP's but comes from local search that began at {best.policy!r}: {why}",)


def _tiny(problem: Problem, budget_bytes: int) -> frozenset[int]:
    """Values too small to matter; none when the budget has no room for them."""
    total = int(problem.rounded_bytes.sum())
    tiny: set[int] = set()
    held = 0
    for value in sorted(movable(problem), key=lambda v: (int(problem.rounded_bytes[v]), v)):
        held += int(problem.rounded_bytes[value])
        if held > total * TINY_SHARE:
            break
        tiny.add(value)
    floor = swap_all_on_demand(problem).peak_bytes + held
    return frozenset(tiny) if floor <= budget_bytes else frozenset()


def _tighten(tightened: dict[int, int], found: Candidate, budget_bytes: int) -> None:
    """Takes the violation, and a little more, off the rows at the worst tick of each violated stretch."""
    memory = found.simulation.memory_bytes
    over = np.flatnonzero(memory > budget_bytes)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    for stretch in stretches:
        tick = int(stretch[np.argmax(memory[stretch])])
        excess = int(memory[tick]) - budget_bytes + int(budget_bytes * EXTRA_TIGHTENING)
        tightened[tick] = tightened.get(tick, 0) + excess


def _plan_of(
    profile: Profile, problem: Problem, found: _Search, budget_bytes: int, workload: str | None, wall_s: float
) -> Plan:
    best, solution = found.best, found.solution
    values, host_bytes = _planned_values(profile, problem, best.schedule.decisions, found.tiny)
    return Plan(
        workload=workload or profile.workload,
        profile_fingerprint=profile.ops_fingerprint,
        budget_bytes=budget_bytes,
        device=profile.device.kind,
        estimate=profile.mode == "fake" or bool(profile.assumed),
        assumed=profile.assumed,
        gradients_live_through_forward=profile.gradients_live_through_forward,
        solve=Solve(
            policy=found.policy or (best.policy if best.policy in ("ilp", "keep-all") else "local search"),
            solver=solution.solver if solution else "none",
            status=solution.status if solution else "not needed",
            objective_s=solution.objective_s if solution else None,
            bound_s=None,
            gap=None,
            wall_s=wall_s,
            rounds=found.rounds,
        ),
        prediction=_prediction(profile, problem, best, host_bytes),
        link=profile.link,
        notes=found.notes,
        record_from_start=best.schedule.record_from_start,
        model=profile.model,
        values=values,
        handles=problem.handles,
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=best.schedule.actions,
    )


def _prediction(profile: Profile, problem: Problem, best: Candidate, host_bytes: int) -> Prediction:
    simulation = best.simulation
    return Prediction(
        peak_bytes=simulation.peak_bytes,
        first_step_peak_bytes=simulation.first_step_peak_bytes,
        in_core_peak_bytes=profile.in_core_peak_bytes,
        in_core_step_s=problem.step_s,
        step_s=simulation.step_s,
        overhead=simulation.step_s / problem.step_s - 1 if problem.step_s > 0 else 0.0,
        stall_s=simulation.stall_s,
        replay_s=simulation.replay_s,
        interference_s=simulation.interference_s,
        out_bytes=simulation.out_bytes,
        in_bytes=simulation.in_bytes,
        host_bytes=host_bytes,
    )


def _planned_values(
    profile: Profile, problem: Problem, decisions: tuple[Decision, ...], tiny: frozenset[int]
) -> tuple[tuple[PlannedValue, ...], int]:
    """The plan's values in save order, and the bytes of the host slab."""
    offset = 0
    planned = []
    for value, decision in enumerate(decisions):
        point = profile.points[problem.save_points[value]]
        handle = profile.handles[point.handle]
        host_offset = -1
        if decision is Decision.SWAP:
            host_offset = offset
            size_bytes = int(problem.size_bytes[value])
            offset += -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
        is_tiny = decision is Decision.KEEP and value in tiny
        planned.append(
            PlannedValue(
                name=problem.names[value],
                layer=problem.layers[value],
                decision=decision,
                size_bytes=int(problem.size_bytes[value]),
                dtype=handle.dtype,
                shape=handle.shape,
                host_offset=host_offset,
                why=problem.must_keep[value] or ("too small to matter" if is_tiny else ""),
            )
        )
    return tuple(planned), offset
