"""StepTrace: what each stream does in one step, op by op, and live bytes; predicted, or measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Phase, Profile
from poochplan.report.memory import MemoryCurve
from poochplan.report.timeline import Bar, Timeline, timeline_of

STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD = "step", "compute", "out-link", "in-link", "launching thread"
TRACKS = (STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD)
_TRACK_OF = {"swap out": OUT_LINK, "swap in": IN_LINK, "runtime": THREAD}


@dataclass(frozen=True)
class StepTrace:
    """Bars lie on ``TRACKS``; on one track they follow each other or lie inside of each other."""

    workload: str
    source: Literal["predicted", "measured"]
    budget_bytes: int
    step_s: float
    bars: tuple[Bar, ...]
    memory: MemoryCurve
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """What else a reader may want to know: peaks, overhead."""


def predicted_trace(profile: Profile, plan: Plan) -> StepTrace:
    """The simulated step; raises ``ModelMismatchError`` when the plan was made from another profile."""
    timeline = timeline_of(profile, plan)
    moves = [
        Bar(_TRACK_OF.get(bar.what, COMPUTE), bar.what, bar.start_s, bar.end_s, bar.label)
        for bar in timeline.bars
        if bar.what in ("stall", "replay", *_TRACK_OF)
    ]
    prediction = plan.prediction
    return StepTrace(
        workload=plan.workload,
        source="predicted",
        budget_bytes=plan.budget_bytes,
        step_s=timeline.step_s,
        bars=tuple(sorted([*_phases(timeline), *_ops(profile, timeline), *moves], key=lambda bar: bar.start_s)),
        memory=timeline.memory,
        facts={
            "peak_bytes": timeline.memory.peak_bytes,
            "peak_layer": timeline.peak_layer,
            "in_core_step_s": prediction.in_core_step_s,
            "overhead": prediction.overhead,
        },
    )


def _phases(timeline: Timeline) -> list[Bar]:
    """Each phase from its first op to the begin of the next."""
    computed = [bar for bar in timeline.bars if bar.row == "compute" and bar.what in tuple(Phase)]
    begins_s: dict[str, float] = {}
    for bar in computed:
        begins_s.setdefault(bar.what, bar.start_s)
    ends_s = [*list(begins_s.values())[1:], timeline.step_s]
    return [Bar(STEP, phase, begin_s, end_s) for (phase, begin_s), end_s in zip(begins_s.items(), ends_s, strict=True)]


def _ops(profile: Profile, timeline: Timeline) -> list[Bar]:
    """One bar for each op: from its tick to the next one's, since what is waited for is waited for at points."""
    times_s = timeline.memory.times_s
    return [
        Bar(COMPUTE, op.name, float(times_s[tick]), float(times_s[tick + 1]), op.layer)
        for op, tick in zip(profile.ops, profile.op_ticks, strict=True)
    ]
