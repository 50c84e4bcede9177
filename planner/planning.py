"""plan(): a Profile and a budget in, a Plan out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from ..errors import InfeasibleError
from ..profiler.schema import PointKind, Profile
from ..units import format_bytes, parse_budget, parse_bytes
from .arena import arena_of
from .candidate import Candidate, swap_all_on_demand
from .optimise import Effort, Optimum, optimise
from .policies import PolicyInput, run_policy
from .problem import Problem, build_problem
from .runtime_cost import runtime_seconds
from .schedule import keep_all
from .schema import Decision, Plan, PlannedValue, Prediction, Solve
from .simulate import simulate
from .whatif import static_bytes

ILP = "ilp"
"""The policy that plans unless another is asked for."""
STRONG_POLICIES = ("greedy", "pooch")
"""Policies that the search asks for their plans where its own are not near the bound."""
HOST_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class _Outcome:
    """What a plan is written from."""

    best: Candidate
    policy: str
    notes: tuple[str, ...] = ()
    optimum: Optimum | None = None
    """None where nothing was searched for."""
    evaluations: int | None = None
    seed: int = 0


def plan(
    profile: Profile,
    budget: str | int | float,
    *,
    solver: str | None = None,
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    threads: int | None = None,
    host_budget: str | int | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    workload: str | None = None,
    policy: str = ILP,
) -> Plan:
    """The plan with the least simulated step time that was found within ``budget``.

    ``budget`` is bytes, text such as ``"8GiB"``, or a share of the in-core peak such as ``"60%"``. The search
    ends when the step is within ``gap`` of the proven bound, or after about ``time_limit_s``; with ``threads`` of
    at least 2 (the default) the bound is improved beside it. ``host_budget`` limits the bytes swapped out (bytes, or
    text). ``evaluations`` counts simulations in place of ``time_limit_s``, with one thread: the same arguments then
    give the same plan, to the bit, however fast or busy the machine is. ``seed`` is that of the random walks.
    ``workload`` replaces the profile's name of the workload. Any ``policy`` but ``"ilp"`` decides alone: no solver, no
    local search, no bound.

    Raises
    ------
    InfeasibleError
        No plan fits, or not the policy's; it names the smallest budget that has a plan.
    UsageError
        The budget cannot be read, the solver is not there, the policy is unknown, or ``evaluations`` come with more
        than one thread or a solver other than HiGHS.
    """
    started_s = time.perf_counter()
    budget_bytes = parse_budget(budget, profile.in_core_peak_bytes)
    problem = build_problem(profile)
    if policy != ILP:
        found = _alone(policy, profile, problem, budget_bytes)
    else:
        host_bytes = None if host_budget is None else parse_bytes(host_budget, "host_budget")
        if threads is None:
            threads = 2 if evaluations is None else 1
        effort = Effort(solver, time_limit_s, gap, max(1, threads), host_bytes, evaluations, seed)
        found = _optimal(profile, problem, budget_bytes, effort)
    return _plan_of(profile, problem, found, budget_bytes, workload, time.perf_counter() - started_s)


def smallest_budget(profile: Profile) -> int:
    """Bytes of the smallest budget that has a plan: the peak with every value away except where it must be live."""
    return swap_all_on_demand(build_problem(profile)).peak_bytes


def _check_feasible(profile: Profile, problem: Problem, budget_bytes: int) -> None:
    smallest = swap_all_on_demand(problem)
    if smallest.peak_bytes <= budget_bytes:
        return
    share = share_that_holds(smallest.peak_bytes, profile.in_core_peak_bytes)
    static = static_bytes(profile)
    if budget_bytes < static:
        raise InfeasibleError(
            f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}): parameters and what "
            f"else lives all step long take {static} bytes ({format_bytes(static)}) alone; expected at least "
            f"{smallest.peak_bytes} bytes ({format_bytes(smallest.peak_bytes)}); pass a budget of {share} or more",
            smallest_budget_bytes=smallest.peak_bytes,
        )
    where = f" at {smallest.simulation.peak_layer}" if smallest.simulation.peak_layer else ""
    raise InfeasibleError(
        f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}): expected at least "
        f"{smallest.peak_bytes} bytes ({format_bytes(smallest.peak_bytes)}, {share} of the in-core peak of "
        f"{format_bytes(profile.in_core_peak_bytes)}), which{where} no decision can lower; "
        f"pass a budget of {share} or more, or make the batch smaller",
        smallest_budget_bytes=smallest.peak_bytes,
    )


def _optimal(profile: Profile, problem: Problem, budget_bytes: int, effort: Effort) -> _Outcome:
    """The plan that keeps everything where that fits, else the best that was found."""
    schedule = keep_all(problem)
    in_core = Candidate("keep-all", schedule.decisions, schedule, simulate(problem, schedule))
    if in_core.peak_bytes <= budget_bytes:
        note = (
            f"the budget of {format_bytes(budget_bytes)} holds the in-core peak of "
            f"{format_bytes(in_core.peak_bytes)}: everything is kept"
        )
        return _Outcome(in_core, "keep-all", (note,))
    _check_feasible(profile, problem, budget_bytes)
    given = PolicyInput(profile, problem, budget_bytes)
    optimum = optimise(problem, budget_bytes, effort, [partial(run_policy, name, given) for name in STRONG_POLICIES])
    best, solution = optimum.best, optimum.solution
    if best.peak_bytes > budget_bytes:
        raise InfeasibleError(
            f"no plan was found within {format_bytes(budget_bytes)} that swaps at most "
            f"{format_bytes(effort.host_bytes or 0)}; pass a larger host budget, or a larger budget",
            smallest_budget_bytes=best.peak_bytes,
        )
    notes: tuple[str, ...] = ()
    if best.policy != ILP:
        is_unsolved = solution is None or solution.decisions is None
        why = f"the solver ended with {solution.status!r}" if solution and is_unsolved else "it simulated faster"
        notes = (f"the plan is not the ILP's but comes from local search that began at {best.policy!r}: {why}",)
    policy = ILP if best.policy == ILP else "local search"
    return _Outcome(best, policy, notes, optimum, effort.evaluations, effort.seed)


def _alone(policy: str, profile: Profile, problem: Problem, budget_bytes: int) -> _Outcome:
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
    return _Outcome(best, policy)


def share_that_holds(size_bytes: int, in_core_peak_bytes: int) -> str:
    """The smallest share, in hundredths of a percent, that ``parse_budget`` reads as at least ``size_bytes``."""
    hundredths = max(1, size_bytes * 10000 // in_core_peak_bytes)
    while parse_budget(f"{hundredths / 100:.2f}%", in_core_peak_bytes) < size_bytes:
        hundredths += 1
    return f"{hundredths / 100:.2f}%"


def _plan_of(
    profile: Profile, problem: Problem, found: _Outcome, budget_bytes: int, workload: str | None, wall_s: float
) -> Plan:
    best, tiny = found.best, found.optimum.tiny if found.optimum else frozenset[int]()
    values, host_bytes = _planned_values(profile, problem, best.schedule.decisions, tiny)
    return Plan(
        workload=workload or profile.workload,
        profile_fingerprint=profile.ops_fingerprint,
        budget_bytes=budget_bytes,
        device=profile.device.kind,
        estimate=profile.mode == "fake" or bool(profile.assumed),
        assumed=profile.assumed,
        roofline=profile.roofline,
        gradients_live_through_forward=profile.gradients_live_through_forward,
        solve=_solve_record(problem, found, wall_s),
        prediction=_prediction(profile, problem, best, host_bytes),
        link=profile.link,
        notes=found.notes,
        record_from_start=best.schedule.record_from_start,
        model=profile.model,
        inputs=profile.inputs,
        values=values,
        handles=problem.handles,
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=best.schedule.actions,
    )


def _solve_record(problem: Problem, found: _Outcome, wall_s: float) -> Solve:
    optimum = found.optimum
    solution = optimum.solution if optimum else None
    bound_s = optimum.bound_s if optimum else problem.step_s if found.policy == "keep-all" else None
    # The simulator adds in another order than the bound: a step cannot be shorter than the bound by more than rounding.
    gap = max(0.0, found.best.simulation.step_s / bound_s - 1) if bound_s else None
    return Solve(
        policy=found.policy,
        solver=solution.solver if solution else "none",
        status=optimum.status if optimum else "not needed",
        objective_s=solution.objective_s if solution else None,
        bound_s=bound_s,
        gap=gap,
        wall_s=wall_s,
        rounds=optimum.rounds if optimum else 0,
        evaluations=found.evaluations,
        seed=found.seed,
    )


def _prediction(profile: Profile, problem: Problem, best: Candidate, host_bytes: int) -> Prediction:
    simulation = best.simulation
    arena = arena_of(profile, problem, best.schedule)
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
        runtime_s=runtime_seconds(profile, problem, best.schedule),
        out_bytes=simulation.out_bytes,
        in_bytes=simulation.in_bytes,
        host_bytes=host_bytes,
        arena_bytes=arena.arena_bytes if arena else None,
        arena_live_bytes=arena.lower_bound_bytes if arena else None,
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
