"""plan(): makes a Plan from a Profile and a budget."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from poochplan.errors import InfeasibleError, UsageError, check_choice
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.plan import Decision, Plan, SolveStatus
from poochplan.formats.profile import Link, Memory, Profile
from poochplan.formats.profile_parts import LOSS_IS_HELD
from poochplan.formats.queries import limits
from poochplan.planner.arena.reserved import (
    ABOVE,
    NOT_WITHIN,
    FittingReserved,
    On,
    budget_bytes_of,
    budget_on,
    covered_bytes,
)
from poochplan.planner.arena.step_layout import NO_ARENA, Fitting, layout_of, smallest_arena
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.search.allowance import SearchCallback, SearchLimits
from poochplan.planner.search.optimise import Optimum, optimise
from poochplan.planner.search.streaming import Search, Streaming, optimise_streaming
from poochplan.planner.simulator.evaluator import begin_build, library, untold_absence
from poochplan.planner.simulator.optimizer_state import STATE, all_streamed
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import Candidate, movable, simulated, swap_all_on_demand
from poochplan.planner.simulator.sources import SOURCES
from poochplan.units import format_bytes, parse_budget, parse_bytes

from .whatif import link_text
from .writing import KEEP_ALL, write_plan

ILP = "ilp"
"""The default policy."""
NO_EVALUATOR = (
    "it was found without the compiled evaluator, about a hundred times more slowly: plan again once pooch doctor says "
    "that it is built"
)
"""A plan's note."""
MAY_BE_LEFT_OUT = (SOURCES, STATE)
"""What ``plan`` can do ``without``."""
STRONG_POLICIES = ("greedy", "pooch")
"""The search also tries the plans of these policies if its own are not near the bound."""


def plan(
    profile: Profile,
    budget: str | int | float,
    *,
    solver: str | None = None,
    time_limit_s: float = 20.0,
    gap: float = 0.005,
    threads: int | None = None,
    host_budget: str | int | None = None,
    ranks_per_host: int = 1,
    evaluations: int | None = None,
    seed: int = 0,
    workload: str | None = None,
    policy: str = ILP,
    watch: SearchCallback | None = None,
    keep_interrupted: bool = False,
    arena: Literal["auto", "on", "off"] = "auto",
    on: On | None = None,
    without: Collection[str] = (),
) -> Plan:
    """The plan with the least simulated step time that was found within ``budget``.

    Parameters
    ----------
    profile: the step to plan, measured by :func:`poochplan.profile`.
    budget: bytes, text such as ``"8GiB"``, or a share of the in-core peak such as ``"60%"``.
    solver: a solver that PuLP finds; HiGHS by default.
    time_limit_s: planning ends after this time. On the first use on a machine a search first waits for the build of its
        compiled evaluator, for at most half of this time. If the build takes longer, the search begins with the plain
        Python simulator.
    gap: the search also ends when the step is within this share of the proven bound.
    threads: with 2 (the default) one improves the bound while the other searches; further ones search too.
    host_budget: most bytes swapped out (bytes, or text; 0 for recomputing alone). The default for a CUDA profile is the
        host memory that was free when it was measured, if it has that figure and assumes no other machine. Otherwise
        there is no limit.
    ranks_per_host: number of processes on one host that train with this plan, each on its own device. Each gets an even
        share of ``host_budget`` and of the link's rates. A link that was measured with as many ranks is not divided.
    evaluations: counts simulations instead of ``time_limit_s``, with one thread. The same arguments then give the
        same plan, to the bit, on a machine of any speed and load.
    seed: of the random walks.
    workload: replaces the profile's name of the workload.
    policy: one other than ``"ilp"`` is used alone: no solver, no local search, no bound.
    watch: is called from time to time with the state of the search, which ends once it returns True.
    keep_interrupted: an interrupt (Ctrl-C) ends the search with the best plan so far, instead of an exception.
    arena: whether the budget covers one arena for the step and everything outside it
        (``Plan.prediction.arena_peak_bytes``), instead of the peak alone. ``"auto"``: for a CPU profile of allocated
        bytes, and if such a plan is found; the plan's notes say if there is none.
    on: what the budget covers. ``"reserved"``: the bytes that torch's allocator takes from a GPU, which ``nvidia-smi``
        shows beside the context; a share is one of the in-core step's. It is the default for a profile measured on a
        GPU. ``"allocated"``: those in use, the default for any other.
    without: what the plan may not do. ``"sources"``: hold sources of larger copies in place of these. ``"state"``: move
        optimizer state to the host between steps of the optimizer.

    Warns, once in a process, if the compiled evaluator cannot be built. The plan's notes say if it was found without.

    Raises
    ------
    InfeasibleError
        No plan fits, or the policy's plan does not. The error names the smallest budget that has a plan.
    UsageError
        The budget is invalid, the solver is not installed, the policy is unknown, or ``evaluations`` is used with more
        than one thread or a solver other than HiGHS.
    """
    started_s = time.perf_counter()
    if unknown := set(without).difference(MAY_BE_LEFT_OUT):
        expected = " or ".join(MAY_BE_LEFT_OUT)
        raise UsageError(f"without: expected {expected}, found {min(unknown)!r}; name one of these, or nothing")
    begin_build()
    on = budget_on(profile, on)
    budget_bytes = budget_bytes_of(profile, budget, on)
    has_arena, measured = in_arena(profile, arena), profile.link
    is_over = profile.in_core_peak_bytes > budget_bytes
    has_sources = policy == ILP and (is_over or on == "reserved") and SOURCES not in without
    problem = Problem.of(profile, ranks=ranks_per_host, has_arena=arena != "off", has_sources=has_sources)
    profile, given = problem.profile, PolicyInput(problem, budget_bytes)
    if policy != ILP and arena == "on":
        raise UsageError(f'arena: expected "auto" or "off" with policy {policy!r}, which decides alone, found "on"')
    host_bytes = None
    if host_budget is None and not profile.assumed:
        host_budget = profile.device.host_bytes
    if host_budget is not None and policy == ILP:
        host_bytes = parse_bytes(host_budget, "host_budget", least=0) // ranks_per_host
    if policy != ILP:
        found = _alone(policy, given, on)
    else:
        if threads is None:
            threads = 2 if evaluations is None else 1
        search = SearchLimits(
            solver, time_limit_s, gap, max(1, threads), host_bytes, evaluations, seed, keep_interrupted
        )
        one_step = _search_within(budget_bytes, on, has_arena=has_arena)
        steps = Streaming(problem, host_bytes)
        if STATE in without or not steps.most or keeps_all(problem, budget_bytes, on):
            steps.most = 0
        if (arena == "on" and is_over) or steps.most:
            _check_feasible(PolicyInput(steps.step(steps.most), budget_bytes), steps.smallest(steps.most), arena)
        if steps.most:
            problem, found = optimise_streaming(steps, budget_bytes, search, one_step, watch)
            given = PolicyInput(problem, budget_bytes)
        else:
            found = one_step(problem, search, watch, ())
        if arena == "on" and NO_ARENA in found.notes:
            found = replace(found, best=swap_all_on_demand(problem), notes=())
    held = (note for note in profile.notes if note.startswith(LOSS_IS_HELD))
    notes = (*held, *_shares(measured, profile.link, host_bytes, ranks_per_host), *_without_evaluator(found))
    found = replace(found, notes=(*found.notes, *notes))
    if line := untold_absence():
        warnings.warn(f"poochplan: {line}", UserWarning, stacklevel=2)
    wall_s = time.perf_counter() - started_s
    return write_plan(given, found, wall_s, is_laid_out=arena != "off", workload=workload, on=on)


def _without_evaluator(found: Optimum) -> Iterator[str]:
    """What a plan's notes say if there is no evaluator, or none yet."""
    if found.status is not SolveStatus.NOT_NEEDED and library() is None:
        yield NO_EVALUATOR


def _shares(measured: Link, link: Link, host_bytes: int | None, ranks_per_host: int) -> Iterator[str]:
    """What a plan's notes say about the rank's share of the host."""
    if ranks_per_host == 1:
        return
    each = f"each of {ranks_per_host} ranks of a host"
    if link is measured:
        yield f"{each} has the link as measured while {link.ranks} ranks copied at once: {link_text(link)}"
    else:
        yield (
            f"{each} has its share of the link, {link_text(link)}, by division: pooch profile --nproc {ranks_per_host} "
            "measures it"
        )
    if host_bytes is not None:
        yield f"{each} swaps at most {format_bytes(host_bytes)}, its share of the host budget"


def _search_within(budget_bytes: int, on: On, *, has_arena: bool) -> Search:
    """The search for the best plan of a step."""

    def search(
        step: Problem, effort: SearchLimits, watch: SearchCallback | None, starts: Sequence[Sequence[Decision]]
    ) -> Optimum:
        given = PolicyInput(step, budget_bytes)
        if on == "reserved":
            return _within_reserved(given, effort, watch, starts)
        return _optimal(given, effort, watch, starts, has_arena=has_arena)

    return search


def keeps_all(problem: Problem, budget_bytes: int, on: On) -> bool:
    """Whether the budget covers the step that keeps everything, without an arena."""
    return covered_bytes(problem, simulated(problem, KEEP_ALL, keep_all(problem)), on) <= budget_bytes


def smallest_budget(
    profile: Profile, *, arena: Literal["auto", "on", "off"] = "auto", without: Collection[str] = ()
) -> int:
    """Bytes of the smallest budget that has a plan: the peak with every movable value, and all movable optimizer state,
    away from the device.

    With ``arena="on"`` it includes the arena of that plan (see :func:`plan`). ``without`` as there. ``pooch plan
    --min`` plans for it, and the error about a smaller budget names it. It is at least 1.
    """
    problem = Problem.of(profile, state=() if STATE in without else all_streamed(profile))
    return max(1, swap_all_on_demand(problem).peak_bytes if arena != "on" else _least_arena(problem))


def _least_arena(problem: Problem) -> int:
    """Bytes of the smallest budget that has a plan with an arena."""
    return min(problem.profile.in_core_peak_bytes, smallest_arena(problem))


def in_arena(profile: Profile, arena: Literal["auto", "on", "off"]) -> bool:
    """Whether budgets cover an arena; see :func:`plan`."""
    check_choice("arena", arena, ("auto", "on", "off"))
    is_known = profile.device.kind == "cpu" and profile.memory is Memory.ALLOCATED
    return arena == "on" or (arena == "auto" and is_known)


def _check_feasible(given: PolicyInput, smallest: Candidate, arena: Literal["auto", "on", "off"] = "off") -> None:
    """Raises unless the budget holds the peak of ``smallest``, the plan with the least; with ``"on"`` in an arena."""
    profile, budget_bytes = given.profile, given.budget_bytes
    smallest_bytes = max(1, smallest.peak_bytes, _least_arena(given.problem) if arena == "on" else 0)
    if smallest_bytes <= budget_bytes:
        return
    share = share_that_holds(smallest_bytes, profile.in_core_peak_bytes)
    static = sum(static_bytes(profile).values())
    expected = f"expected at least {smallest_bytes} bytes ({format_bytes(smallest_bytes)}"
    if budget_bytes < static:
        reason = (
            f"parameters and whatever else stays in memory for the whole step take {static} bytes "
            f"({format_bytes(static)}) alone; {expected}); pass a budget of {share} or more"
        )
    else:
        where = smallest.simulation.peak_layer or "one moment of the step"
        also = "".join(f"; {line}" for line in limits(profile))  # other ways to make it smaller
        reason = (
            f"{expected}, {share} of the in-core peak of {format_bytes(profile.in_core_peak_bytes)}), which {where} "
            f"needs at once whatever is swapped or recomputed; pass a budget of {share} or more, or make the batch "
            f"smaller{also}"
        )
    raise InfeasibleError(
        f"no plan fits a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}): {reason}",
        smallest_budget_bytes=smallest_bytes,
    )


def _optimal(
    given: PolicyInput,
    search: SearchLimits,
    watch: SearchCallback | None,
    starts: Sequence[Sequence[Decision]],
    *,
    has_arena: bool,
) -> Optimum:
    """The plan that keeps everything if no plan can be faster; else the best plan that was found."""
    problem, budget_bytes = given.problem, given.budget_bytes
    in_core, laid = simulated(problem, KEEP_ALL, keep_all(problem)), None
    kept = Optimum(in_core, KEEP_ALL)
    peak = f"the {'peak beside streamed optimizer state' if problem.state else 'in-core peak'} of"
    holds = f"the budget of {format_bytes(budget_bytes)} holds {peak} {format_bytes(in_core.peak_bytes)}"
    if in_core.peak_bytes > budget_bytes:
        _check_feasible(given, swap_all_on_demand(problem))
    else:
        if has_arena and problem.unserved is not problem:
            laid = layout_of(problem, in_core.schedule)
        kept = replace(kept, notes=(f"{holds}: everything is kept",), laid=laid)
        if laid is None or laid.peak_bytes <= budget_bytes:
            return kept
    fitting = Fitting(problem, budget_bytes) if has_arena else None
    proposals = [partial(run_policy, name, given) for name in STRONG_POLICIES]
    found = optimise(problem, budget_bytes, search, proposals, watch, fitting, starts)
    if laid is None:
        return found
    if NO_ARENA in found.notes or found.best.simulation.step_s >= problem.unserved.keep_all_s:
        return replace(kept, laid=None, bound_s=found.bound_s, status=found.status, solver=found.solver)
    note = (
        f"{holds}, but an arena for it would take {format_bytes(laid.peak_bytes)}: a step whose arena fits is shorter "
        "than one that keeps everything without an arena"
    )
    return replace(found, notes=(note, *found.notes))


def _within_reserved(
    given: PolicyInput, search: SearchLimits, watch: SearchCallback | None, starts: Sequence[Sequence[Decision]]
) -> Optimum:
    """The best plan that was found whose reserved bytes fit the budget; else one with about the fewest."""
    fitting = FittingReserved(given.problem, given.budget_bytes)
    in_core = simulated(given.problem, KEEP_ALL, keep_all(given.problem))
    if fitting.pack(in_core) <= given.budget_bytes:
        step = "the step beside streamed optimizer state" if given.problem.state else "the in-core step"
        note = f"the budget of {format_bytes(given.budget_bytes)} holds what {step} reserves"
        return Optimum(in_core, KEEP_ALL, notes=(f"{note}: everything is kept",))
    smallest = swap_all_on_demand(given.problem)
    _check_feasible(given, smallest)
    if search.host_bytes is None or int(given.problem.size_bytes[movable(given.problem)].sum()) <= search.host_bytes:
        fitting.pack(smallest)  # a search among plans with more live bytes may meet none that fits
    proposals = [partial(run_policy, name, given) for name in STRONG_POLICIES]
    found = optimise(given.problem, given.budget_bytes, search, proposals, watch, fitting, starts)
    return replace(found, best=fitting.nearest(found.best)) if NOT_WITHIN in found.notes else found


def _alone(policy: str, given: PolicyInput, on: On) -> Optimum:
    """The unchanged plan of one policy, which knows bytes in use alone."""
    best = run_policy(policy, given)
    budget_bytes, in_core_peak_bytes = given.budget_bytes, given.profile.in_core_peak_bytes
    if best.peak_bytes > budget_bytes:
        smallest = swap_all_on_demand(given.problem)
        _check_feasible(given, smallest)
        raise InfeasibleError(
            f"the plan of policy {policy!r} does not fit a budget of {budget_bytes} bytes "
            f"({format_bytes(budget_bytes)}): its peak is {best.peak_bytes} bytes ({format_bytes(best.peak_bytes)}, "
            f"{share_that_holds(best.peak_bytes, in_core_peak_bytes)} of the in-core peak); raise the budget, or take "
            f"policy {ILP!r}, which has plans from {share_that_holds(smallest.peak_bytes, in_core_peak_bytes)} on",
            smallest_budget_bytes=smallest.peak_bytes,
        )
    taken_bytes = covered_bytes(given.problem, best, on)
    return Optimum(best, policy, notes=(ABOVE,) if taken_bytes > budget_bytes else ())


def share_that_holds(size_bytes: int, in_core_peak_bytes: int) -> str:
    """The smallest share, in hundredths of a percent, that ``parse_budget`` reads as at least ``size_bytes``."""
    peak_bytes = max(1, in_core_peak_bytes)
    hundredths = max(1, size_bytes * 10000 // peak_bytes)
    while parse_budget(f"{hundredths / 100:.2f}%", peak_bytes) < size_bytes:
        hundredths += 1
    return f"{hundredths / 100:.2f}%"
