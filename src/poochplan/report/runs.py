"""The results of ``pooch run`` as a record of measured figures and the plan's predictions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Host
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import RankRun, RunRecord
from poochplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from poochplan.runtime.run_report import ArenaReport, StepReport
    from poochplan.verify import Comparison, Run

MUCH_OFF = 0.5
"""Smallest relative difference at which a measured time contradicts the profile."""
LEAST_OFF_S = 0.02
"""Smaller differences count as noise of the machine, even in a short step."""


def run_record(
    planned: Run,
    versions: dict[str, str],
    host: Host,
    *,
    comparison: Comparison | None = None,
    why_not_served: str = "",
) -> RunRecord:
    """The figures of a run under a plan and, if it was compared, of the in-core run.

    Bytes and seconds of one step are medians over its steps. ``why_not_served`` is why no arena could serve them, if
    that is known before the run.
    """
    plan, report = planned.plan, planned.report
    assert plan is not None
    assert report is not None
    prediction, total, memory, arena = plan.prediction, report.total, report.memory, report.arena
    steps = planned.step_reports
    timed = [step for step in steps[1:] if step.peak_bytes is None] or steps
    in_core_s = None if comparison is None else comparison.in_core.step_s
    left_steps = sum(step.fallbacks > 0 for step in steps)
    record = RunRecord(
        workload=plan.workload,
        plan_fingerprint=plan.fingerprint,
        versions=versions,
        host=host,
        in_core_peak_bytes=prediction.in_core_peak_bytes,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=max(prediction.peak_bytes, prediction.first_step_peak_bytes),
        measured_peak_bytes=max((step.peak_bytes for step in steps if step.peak_bytes is not None), default=None),
        in_core_step_s=in_core_s or prediction.in_core_step_s,
        in_core_step_measured=in_core_s is not None,
        predicted_step_s=prediction.step_s,
        planned_step_s=planned.step_s,
        predicted_overhead=prediction.overhead,
        measured_overhead=planned.step_s / (in_core_s or prediction.in_core_step_s) - 1,
        out_bytes=_median(timed, "out_bytes"),
        in_bytes=_median(timed, "in_bytes"),
        replay_s=statistics.median(step.replay_s for step in timed),
        replayed_values=_median(timed, "replayed_values"),
        stall_s=statistics.median(step.stall_s for step in timed),
        contradiction="" if left_steps else contradiction(plan, planned.step_s, in_core_s),
        steps=len(steps),
        left_steps=left_steps,
        fallbacks=total.fallbacks,
        fallback_reasons=tuple(total.fallback_reasons),
        departures=tuple(total.departures),
        bitwise_equal=None if comparison is None else comparison.difference is None,
        difference=None if comparison is None else comparison.difference,
        compared_steps=0 if comparison is None else comparison.compared_steps,
        compared_tensors=0 if comparison is None else comparison.compared_tensors,
        allocated_peak_bytes=None if memory is None else memory.allocated_bytes,
        reserved_peak_bytes=None if memory is None else memory.reserved_bytes,
        arena_bytes=prediction.arena_bytes,
        arena_live_bytes=prediction.arena_live_bytes,
        arena_peak_bytes=prediction.arena_peak_bytes,
        memory=prediction.memory,
        predicted_live_peak_bytes=prediction.live_peak_bytes,
        why_not_served=_why_not_served(arena, why_not_served or ("steps left the plan" if left_steps else "")),
    )
    if arena is None:
        return record
    return msgspec.structs.replace(
        record,
        served_arena_bytes=arena.size_bytes or None,
        served_blocks=arena.served,
        served_bytes=arena.served_bytes,
        unserved_blocks=arena.unplanned + arena.taken,
        unserved_bytes=arena.unplanned_bytes + arena.taken_bytes,
        unserved=_unserved(arena),
    )


def worst_of(records: Sequence[RunRecord]) -> RunRecord:
    """The record of the worst rank, with the results of each; ``records`` are by rank.

    A rank that differs from in-core is worse than one above the budget, and that is worse than one that left the plan.
    Otherwise the largest peak decides, then the longest step.
    """

    def badness(rank: int) -> tuple[bool, bool, int, int, float]:
        one = records[rank]
        return (
            one.difference is not None,
            one.is_over,
            one.left_steps,
            one.measured_peak_bytes or 0,
            one.planned_step_s,
        )

    worst = max(range(len(records)), key=badness)
    names = RankRun.__struct_fields__
    ranks = tuple(RankRun(**{name: getattr(one, name) for name in names}) for one in records)
    return msgspec.structs.replace(records[worst], rank=worst, ranks=ranks)


def contradiction(plan: Plan, planned_s: float, in_core_s: float | None) -> str:
    """One line if the measured time differs from the profile's by more than half of that; else empty.

    If both timed the in-core step by PyTorch alone (``--check``), these times are compared; else the planned step with
    its prediction. Differences below 20 ms do not count. Assumed times are not compared.
    """
    prediction = plan.prediction
    if plan.estimate:
        return ""
    what, found_s, said_s, source = "planned", planned_s, prediction.step_s, "the plan predicts"
    if in_core_s is not None and prediction.is_timed_alone:
        what, found_s, said_s, source = "in-core", in_core_s, prediction.in_core_step_s, "the profile says"
    if abs(found_s - said_s) <= max(LEAST_OFF_S, MUCH_OFF * said_s):
        return ""
    return (
        f"the {what} step took {format_seconds(found_s)}, where {source} {format_seconds(said_s)}: the machine was "
        "busy during one of the two; profile again, and plan from that"
    )


def _why_not_served(arena: ArenaReport | None, known: str) -> str:
    """Why no step was served, in one line; empty if one was."""
    if arena is None:
        return known or "the first steps are ordinary, and no step came behind them; raise --timed"
    if arena.larger_bytes:
        return f"the arena would be {format_bytes(arena.larger_bytes)} above what the budget has room for"
    return ""


def _unserved(arena: ArenaReport) -> tuple[str, ...]:
    """The first blocks that lay outside the arena, unlike planned, and the reasons."""
    why = {"unplanned": "not expected there", "taken": "its place was in use"}
    return tuple(
        f"{format_bytes(one.size_bytes)} in {one.layer or OUTSIDE}, {why.get(one.why, one.why)}"
        for one in arena.unserved
    )


def _median(steps: Sequence[StepReport], field: str) -> int:
    return int(statistics.median(getattr(step, field) for step in steps))
