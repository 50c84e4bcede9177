"""Writes the Plan from the results of a search, or from decisions by hand: values, schedule, prediction, solve."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from poochplan.errors import UsageError, check_choice
from poochplan.formats.files import package_version
from poochplan.formats.plan import Decision, Plan, PlannedValue, Prediction, Solve, SolveStatus
from poochplan.formats.profile import Memory, PointKind, Profile
from poochplan.formats.profile_parts import host_aligned
from poochplan.planner.arena.caching_allocator import SMALL_BYTES
from poochplan.planner.arena.reserved import On, is_reserved_known, reserved_peak
from poochplan.planner.arena.step_layout import Laid, layout_of
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.optimizer_state import added_seconds, streamed_bytes
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import Candidate, simulate, try_decisions

KEEP_ALL = "keep-all"
"""The policy of a plan that keeps everything: no step is shorter."""
WIDE_GAP = 0.02
"""Above this share a plan's notes say what its gap means."""
LAUNCH_BOUND = 0.05
"""Above this share of a step in waits for launches, a plan's notes say so."""
BY_HAND = "by hand"
"""The policy of a plan whose decisions were changed by hand."""


def write_plan(
    given: PolicyInput,
    found: Optimum,
    wall_s: float,
    *,
    is_laid_out: bool,
    workload: str | None = None,
    on: On = "allocated",
) -> Plan:
    """The Plan for a search's result, found in ``wall_s`` seconds. With ``is_laid_out`` its arena may be used.
    ``workload`` replaces the profile's name.
    """
    problem, laid = given.problem, found.laid
    if found.bound_s is None and found.policy == KEEP_ALL:
        found = replace(found, bound_s=problem.keep_all_s)
    if laid is None and is_laid_out and given.profile.device.kind == "cpu" and not given.profile.roofline:
        laid = layout_of(problem, found.best.schedule)
    if laid is None or laid.peak_bytes > given.budget_bytes:  # its steps cannot use an arena
        problem, found = problem.unserved, _without_arena(problem, found)
    profile, best = problem.profile, found.best
    # The simulator adds in another order than the bound, so a step may be shorter than the bound by rounding alone.
    gap = max(0.0, best.simulation.step_s / found.bound_s - 1) if found.bound_s else None
    same = ("policy", "solver", "status", "objective_s", "bound_s", "rounds", "evaluations", "seed")
    solve = Solve(gap=gap, wall_s=wall_s, **{name: getattr(found, name) for name in same})
    notes = found.notes
    if gap is not None and gap > WIDE_GAP:
        notes += (
            f"its step is proven to be at most {gap:.1%} longer than that of the best plan there is: a longer "
            "search may find a better one, or prove more",
        )
    waits = 0.0 if problem.launch_cost.is_compute else best.simulation.runtime_s / best.simulation.step_s
    if waits > LAUNCH_BOUND:
        notes += (
            f"its step is bound by launching: in {waits:.0%} of it the device waits for the launching thread, which "
            "hooks, copies and replays hold up; fewer and larger ops, or a larger budget, make that less",
        )
    values, host_bytes = _planned_values(problem, best.schedule.decisions, found.tiny)
    return Plan(
        workload=workload or profile.workload,
        profile_fingerprint=profile.ops_fingerprint,
        budget_bytes=given.budget_bytes,
        on=on,
        device=profile.device.kind,
        versions=profile.versions | {"poochplan": package_version()},
        switches=profile.switches,
        host=profile.host,
        estimate=profile.mode == "fake" or bool(profile.assumed),
        assumed=profile.assumed,
        roofline=profile.roofline,
        gradients_live_through_forward=profile.gradients_live_through_forward,
        static_bytes=dict(profile.static_bytes),
        solve=solve,
        prediction=_prediction(problem, best, host_bytes, laid),
        link=profile.link,
        notes=notes,
        record_from_start=best.schedule.record_from_start,
        model=profile.model,
        inputs=profile.inputs,
        values=values,
        handles=problem.handles,
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=best.schedule.actions,
        state=problem.state,
        layout=laid.layout if laid else None,
    )


def _without_arena(problem: Problem, found: Optimum) -> Optimum:
    """The same plan simulated with the seconds of steps without an arena. Its bound stays that of steps with an arena:
    there may be such a plan that was not found. If a disturbed profile has shorter steps without one, the bound is
    shorter by the same ratio: only ops change their speed, so no step shrinks by more than they do.
    """
    slower = problem.unserved
    if slower is problem:
        return found
    best = replace(found.best, simulation=simulate(slower, found.best.schedule))
    bound_s, status = found.bound_s, found.status
    if bound_s is not None:
        shrinks = min(1.0, slower.profile.times.step_s / problem.profile.times.step_s)
        bound_s *= shrinks
        is_farther = best.simulation.step_s > found.best.simulation.step_s * shrinks
        if is_farther and status is SolveStatus.WITHIN_GAP:  # that was with an arena
            status = SolveStatus.SEARCHED
    return replace(found, best=best, bound_s=bound_s, status=status)


def with_decisions(profile: Profile, plan: Plan, changes: Mapping[str, Decision | str]) -> Plan:
    """The plan with other decisions for some values, scheduled and simulated anew, without a search.

    ``changes`` are decisions by the names of values. The budget stays the same, and the predicted peak may exceed it. A
    swapped value that needs no release is kept.

    Raises
    ------
    ModelMismatchError
        The plan was made from another profile.
    UsageError
        The plan has no value of that name, or the value cannot have that decision; the message says why.
    """
    started_s = time.perf_counter()
    problem = Problem.of(profile, plan, has_arena=True)
    place = {name: index for index, name in enumerate(problem.names)}
    wish = [value.decision for value in plan.values]
    for name, decision in changes.items():
        if name not in place:
            raise UsageError(f"changes: expected names of the plan's values, found {name!r}; Plan.values has them")
        wish[place[name]] = _possible(problem, place[name], decision)
    best = try_decisions(problem, BY_HAND, wish, plan.budget_bytes)
    given, wall_s = PolicyInput(problem, plan.budget_bytes), time.perf_counter() - started_s
    found, has_layout = Optimum(best, BY_HAND), plan.layout is not None
    return write_plan(given, found, wall_s, is_laid_out=has_layout, workload=plan.workload, on=plan.on)


def _possible(problem: Problem, value: int, decision: Decision | str) -> Decision:
    """The decision; raises ``UsageError`` if the value cannot have it."""
    name = problem.names[value]
    check_choice(name, str(decision), tuple(Decision))
    reason = problem.must_keep[value] if decision != Decision.KEEP else ""
    if decision == Decision.RECOMPUTE and not reason and problem.replay.replays[value] is None:
        reason = problem.replay.reasons[value]
    if reason:
        raise UsageError(f"{name}: cannot be decided {str(decision)!r}: {reason}; choose another value")
    return Decision(decision)


def _prediction(problem: Problem, best: Candidate, host_bytes: int, laid: Laid | None) -> Prediction:
    peaks, moved = ("peak_bytes", "first_step_peak_bytes"), ("out_bytes", "in_bytes")
    same = (*peaks, *moved, "step_s", "stall_s", "replay_s", "interference_s", "runtime_s")
    profile, in_core = problem.profile, problem.with_state(())
    reserved: list[int | None] = [None, None, None]
    if is_reserved_known(profile):
        reserved = [reserved_peak(problem, best.schedule, is_expandable=one) for one in (True, False)]
        reserved.append(reserved_peak(in_core, keep_all(in_core)))
    return Prediction(
        reserved_peak_bytes=reserved[0],
        unexpanded_peak_bytes=reserved[1],
        expands=bool(profile.device.expands),
        live_peak_bytes=_live_peak(profile, best),
        memory=profile.memory,
        allocated_peak_bytes=_handed_out(profile, best) if profile.device.kind == "cuda" else None,
        in_core_peak_bytes=profile.in_core_peak_bytes,
        in_core_reserved_bytes=reserved[2],
        in_core_step_s=problem.plain_s,
        is_timed_alone=in_core.profile.times.plain_step_s is not None,
        kept_step_s=in_core.keep_all_s,
        overhead=problem.overhead(best.simulation.step_s),
        state_s=added_seconds(problem.measured, problem.state),
        state_bytes=streamed_bytes(problem.state),
        host_bytes=host_bytes,
        arena_bytes=laid.layout.arena_bytes if laid else None,
        arena_live_bytes=laid.live_bytes if laid else None,
        arena_peak_bytes=laid.peak_bytes if laid else None,
        **{name: getattr(best.simulation, name) for name in same},
    )


def _handed_out(profile: Profile, best: Candidate) -> int:
    """The peak of the same schedule if a GPU's allocator hands out each large block as large as it may."""

    def block(size_bytes: int) -> int:
        return size_bytes + SMALL_BYTES if size_bytes > SMALL_BYTES else size_bytes

    values = tuple(msgspec.structs.replace(one, size_bytes=block(one.size_bytes)) for one in profile.values)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=block(op.workspace_bytes)) for op in profile.ops)
    found = simulate(Problem.of(msgspec.structs.replace(profile, values=values, ops=ops)), best.schedule)
    return max(found.peak_bytes, found.first_step_peak_bytes)


def _live_peak(profile: Profile, best: Candidate) -> int:
    """The peak of the same schedule without the memory that ops take and give back inside."""
    if profile.memory is Memory.LIVE and not any(op.workspace_bytes for op in profile.ops):
        return best.simulation.peak_bytes
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) for op in profile.ops)
    live = msgspec.structs.replace(profile, ops=ops, memory=Memory.LIVE)
    return simulate(Problem.of(live), best.schedule).peak_bytes


def _planned_values(
    problem: Problem, decisions: tuple[Decision, ...], tiny: frozenset[int]
) -> tuple[tuple[PlannedValue, ...], int]:
    """The plan's values in save order, and the bytes of the host slab."""
    profile, offset, until = problem.profile, 0, last_recipes(problem, decisions)
    planned = []
    for value, decision in enumerate(decisions):
        handle = profile.handles[profile.points[problem.save_points[value]].handle]
        size_bytes = int(problem.size_bytes[value])
        host_offset = -1
        if decision is Decision.SWAP:
            host_offset = offset
            offset += host_aligned(size_bytes)
        is_tiny = decision is Decision.KEEP and value in tiny
        planned.append(
            PlannedValue(
                name=problem.names[value],
                layer=problem.layers[value],
                decision=decision,
                size_bytes=size_bytes,
                dtype=handle.dtype,
                shape=handle.shape,
                host_offset=host_offset,
                why=problem.must_keep[value] or ("too small to matter" if is_tiny else ""),
                source=value in problem.copies,
                until=until.get(value, -1),
            )
        )
    return tuple(planned), offset


def last_recipes(problem: Problem, decisions: tuple[Decision, ...]) -> dict[int, int]:
    """By source from which a replay starts: the last save point of a value with such a replay."""
    until: dict[int, int] = {}
    for value, decision in enumerate(decisions):
        if decision is Decision.RECOMPUTE:
            until |= {source: value for source in problem.replay.of(value).inputs if source in problem.copies}
    return until
