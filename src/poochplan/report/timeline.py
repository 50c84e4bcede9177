"""One planned step over time: a picture of its streams and live memory, and trace events for Perfetto.

Trace events have the format of Chromium's catapult project, which ui.perfetto.dev and chrome://tracing open: complete
events (``"ph": "X"``), counters (``"C"``) and metadata (``"M"``); times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poochplan.formats.files import write_atomic
from poochplan.formats.occupancy import (
    COMPUTE,
    IN_LINK,
    OUT_LINK,
    STEP,
    THREAD,
    TRACKS,
    Bar,
    MemoryCurve,
    StepTrace,
    live_bytes,
    static_bytes,
)
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Phase, Profile
from poochplan.peak import simulate_plan
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.streams import Lane
from poochplan.units import format_bytes, format_copies, format_seconds, share_of_peak

from . import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "forward": palette.BLUE,
    "backward": palette.SKY,
    "optimizer": "#BBBBBB",
    "replay": palette.AMBER,
    "stall": palette.ORANGE,
    "runtime": palette.YELLOW,
    "swap out": palette.PINK,
    "swap in": palette.GREEN,
}
ROWS = ("in-core", "compute", "swap out", "swap in")
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_TRACK_OF = {"swap out": OUT_LINK, "swap in": IN_LINK, "runtime": THREAD, "stall": COMPUTE, "replay": COMPUTE}


@dataclass(frozen=True)
class Timeline:
    """The data of the picture. The ``row`` of a bar is one of ``ROWS``, its ``what`` a key of ``COLOURS``."""

    plan: Plan
    bars: tuple[Bar, ...]
    memory: MemoryCurve
    in_core_memory: MemoryCurve
    static_bytes: int
    """Bytes that live through the whole step."""
    peak_layer: str
    measured_peak_bytes: int | None = None
    measured_overhead: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the planned step; the in-core one may be longer."""
        return float(self.memory.times_s[-1])


def in_core_curve(profile: Profile) -> MemoryCurve:
    """The in-core step's memory over time. Ops run one after another and take their time by PyTorch alone."""
    live = live_bytes(profile)
    ticks = np.asarray(profile.op_ticks, dtype=np.int64)
    return MemoryCurve(times_s=np.concatenate([[0.0], _in_core_ends_s(profile)]), size_bytes=live[ticks])


def timeline_of(
    profile: Profile, plan: Plan, *, measured_peak_bytes: int | None = None, measured_overhead: float | None = None
) -> Timeline:
    """The simulated step of a plan; raises ``ModelMismatchError`` if the plan has another profile."""
    problem = Problem.of(profile, plan)
    simulation, planned = simulate_plan(problem, plan), problem.profile
    starts_s = simulation.tick_start_s
    boundaries_s = _phase_starts(planned, [float(starts_s[tick]) for tick in planned.op_ticks])
    in_core_s = _in_core_ends_s(profile)
    in_core_boundaries_s = _phase_starts(profile, [0.0, *in_core_s[:-1].tolist()])
    bars = _split("in-core", 0.0, float(in_core_s[-1]), in_core_boundaries_s)
    for span in simulation.trace:
        if span.lane is Lane.COMPUTE:
            bars += _split("compute", span.start_s, span.end_s, boundaries_s)
        elif span.lane in (Lane.STALL, Lane.REPLAY, Lane.RUNTIME):
            bars.append(Bar("compute", str(span.lane), span.start_s, span.end_s, span.label))
        else:
            row = "swap out" if span.lane is Lane.OUT else "swap in"
            bars.append(Bar(row, row, span.start_s, span.end_s, span.label))
    return Timeline(
        plan=plan,
        bars=tuple(bars),
        memory=MemoryCurve(np.append(starts_s, simulation.step_s), simulation.memory_bytes),
        in_core_memory=in_core_curve(profile),
        static_bytes=sum(static_bytes(planned).values()),
        peak_layer=simulation.peak_layer,
        measured_peak_bytes=measured_peak_bytes,
        measured_overhead=measured_overhead,
    )


def _in_core_ends_s(profile: Profile) -> np.ndarray:
    """Second at which each op of the in-core step ends."""
    return profile.plain_scale * np.cumsum([op.duration_s for op in profile.ops])


def _phase_starts(profile: Profile, op_starts_s: list[float]) -> dict[str, float]:
    """Second at which each phase that the step has begins."""
    starts: dict[str, float] = {}
    for phase in Phase:
        first = next((index for index, op in enumerate(profile.ops) if op.phase is phase), None)
        if first is not None:
            starts[str(phase)] = op_starts_s[first] if starts else 0.0
    return starts


def _split(row: str, start_s: float, end_s: float, phase_starts_s: dict[str, float]) -> list[Bar]:
    """Bars for a span of time, which is cut at the beginnings of phases."""
    ends_s = [*list(phase_starts_s.values())[1:], float("inf")]
    cut = [
        Bar(row, phase, max(start_s, begin_s), min(end_s, stop_s))
        for (phase, begin_s), stop_s in zip(phase_starts_s.items(), ends_s, strict=True)
    ]
    return [bar for bar in cut if bar.end_s > bar.start_s]


def predicted_trace(profile: Profile, plan: Plan) -> StepTrace:
    """The simulated step; raises ``ModelMismatchError`` if the plan has another profile."""
    timeline, planned = timeline_of(profile, plan), Problem.of(profile, plan).profile
    memory, prediction = timeline.memory, plan.prediction
    moves = [
        Bar(_TRACK_OF[bar.what], bar.what, bar.start_s, bar.end_s, bar.label)
        for bar in timeline.bars
        if bar.what in _TRACK_OF
    ]
    starts_s = _phase_starts(planned, [float(memory.times_s[tick]) for tick in planned.op_ticks])
    phases = _split(STEP, 0.0, timeline.step_s, starts_s)
    ops = [  # each ends at the beginning of the next tick, because all waits are at points
        Bar(COMPUTE, op.name, float(memory.times_s[tick]), float(memory.times_s[tick + 1]), op.layer)
        for op, tick in zip(planned.ops, planned.op_ticks, strict=True)
    ]
    return StepTrace(
        workload=plan.workload,
        source="predicted",
        budget_bytes=plan.budget_bytes,
        step_s=timeline.step_s,
        bars=tuple(sorted([*phases, *ops, *moves], key=lambda bar: bar.start_s)),
        memory=memory,
        facts={
            "peak_bytes": memory.peak_bytes,
            "peak_layer": timeline.peak_layer,
            "in_core_step_s": prediction.in_core_step_s,
            "overhead": prediction.overhead,
        },
    )


def draw_timeline(timeline: Timeline) -> Figure:
    """A figure with rows for the streams above the live memory, on one time axis."""
    plan, prediction = timeline.plan, timeline.plan.prediction
    share = share_of_peak(plan.budget_bytes, timeline.in_core_memory.peak_bytes)
    headline = f"{plan.workload} within {share:.0%} of its memory: predicted overhead {prediction.overhead:+.1%}"
    if timeline.measured_overhead is not None:
        headline += f", measured {timeline.measured_overhead:+.1%}"
    subtitle = (
        f"step {format_seconds(prediction.step_s)}, {prediction.in_core_text};  {prediction.causes_text};  "
        f"{format_copies(prediction.out_bytes, prediction.in_bytes)}"
    )
    figure = palette.new_figure(5.6, headline, subtitle)
    heights, place = (1.0, 1.6), palette.placed(figure, 1.0, 0.9, hspace=0.07)
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=heights, gridspec_kw=place)
    scale_s, unit = next((one for one in _UNITS if timeline.step_s >= 2 * one[0]), _UNITS[-1])
    draw_streams(streams, timeline, scale_s)
    draw_memory(memory, timeline, scale_s, f"time in the step ({unit})")
    memory.set_xlim(0, max(float(timeline.in_core_memory.times_s[-1]), *(bar.end_s for bar in timeline.bars)) / scale_s)
    palette.legend(figure, streams, 8, above=True)
    palette.legend(figure, memory, 8)
    return figure


def draw_streams(axes: Axes, timeline: Timeline, scale_s: float) -> None:
    """Draws one row per stream. The colour of a bar shows its activity."""
    shown = [row for row in reversed(ROWS) if any(bar.row == row for bar in timeline.bars)]
    for y, row in enumerate(shown):
        height = 0.42 if row == "in-core" else 0.74
        bars = [bar for what in COLOURS for bar in timeline.bars if (bar.row, bar.what) == (row, what)]
        stretches = [(bar.start_s / scale_s, (bar.end_s - bar.start_s) / scale_s) for bar in bars]
        colours = [COLOURS[bar.what] for bar in bars]
        axes.broken_barh(stretches, (y - height / 2, height), color=colours, linewidth=0.4)
    used = {bar.what for bar in timeline.bars}
    palette.squares(axes, {what: colour for what, colour in COLOURS.items() if what in used})
    axes.set_yticks(range(len(shown)), labels=shown)
    axes.set_ylim(-0.55, len(shown) - 0.45)
    palette.plain_axes(axes)
    axes.tick_params(labelbottom=False)


def draw_memory(axes: Axes, timeline: Timeline, scale_s: float, x: str) -> None:
    """Draws live bytes over time: in-core, planned, the budget and the peak."""
    planned, in_core, budget_bytes = timeline.memory, timeline.in_core_memory, timeline.plan.budget_bytes
    factor, unit = palette.byte_unit(max(in_core.peak_bytes, budget_bytes))
    axes.stairs(
        in_core.size_bytes / factor, in_core.times_s / scale_s, color=palette.QUIET, linewidth=1.1, baseline=None,
        linestyle=palette.DASHED, label=f"in-core, peak {format_bytes(in_core.peak_bytes)}",
    )  # fmt: skip
    draw_live(axes, planned, budget_bytes, scale_s, factor, "planned")
    reserved_bytes = timeline.plan.prediction.reserved_with(timeline.plan.prediction.expands) or 0
    if reserved_bytes:
        palette.level(axes, "reserved", reserved_bytes, factor, color=palette.BLUE, linestyle=(0, (5, 1.5)))
    if timeline.measured_peak_bytes is not None:
        dots = {"color": palette.PURPLE, "linewidth": 1.4, "linestyle": (0, (1, 1.5))}
        palette.level(axes, "measured peak", timeline.measured_peak_bytes, factor, **dots)
    if timeline.static_bytes:
        axes.axhspan(
            0, timeline.static_bytes / factor, color="#8C8C8C", alpha=0.35, linewidth=0,
            label=f"always live {format_bytes(timeline.static_bytes)}",
        )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(in_core.peak_bytes, planned.peak_bytes, budget_bytes, reserved_bytes) / factor)
    palette.plain_axes(axes, "left", "bottom", grid="y", x=x, y=f"live memory ({unit})")
    is_left = planned.peak_s < 0.6 * timeline.step_s
    axes.annotate(
        f"peak in {timeline.peak_layer}" if timeline.peak_layer else "peak",
        (planned.peak_s / scale_s, planned.peak_bytes / factor), xytext=(3 if is_left else -3, 6),
        textcoords="offset points", ha="left" if is_left else "right",
        fontsize=8, color=palette.INK, zorder=6,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
    )  # fmt: skip


def draw_live(axes: Axes, memory: MemoryCurve, budget_bytes: int, scale_s: float, factor: int, name: str) -> None:
    """Draws the budget, and a predicted step's live bytes with a dot at their peak."""
    palette.level(axes, "budget", budget_bytes, factor)
    times, sizes = memory.times_s / scale_s, memory.size_bytes / factor
    axes.stairs(sizes, times, fill=True, color=palette.BLUE, alpha=0.18, linewidth=0)
    peak = f"{name}, peak {format_bytes(memory.peak_bytes)}"
    axes.stairs(sizes, times, color=palette.BLUE, linewidth=1.3, baseline=None, label=peak)
    axes.plot(
        [memory.peak_s / scale_s], [memory.peak_bytes / factor], marker="o", markersize=4.5, color=palette.INK, zorder=5
    )


def write_trace(trace: StepTrace, path: str | Path, *, force: bool = False) -> Path:
    """Writes the trace as JSON, one event a line. It only replaces a file with ``force``."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in _events(trace))
    facts = {"source": trace.source, "budget_bytes": trace.budget_bytes, **trace.facts}
    rest = json.dumps({"displayTimeUnit": "ms", "otherData": facts}, allow_nan=False)
    return write_atomic(path, f'{{"traceEvents": [\n{lines}\n],\n{rest[1:]}\n'.encode(), force=force)


def _events(trace: StepTrace) -> Iterator[dict[str, Any]]:
    """A track for each stream that was used, and counters of live bytes and the budget."""
    used = {bar.row for bar in trace.bars}
    tracks = {name: number for number, name in enumerate(TRACKS, 1) if name in used}
    yield _event("M", "process_name", 0, name=f"{trace.workload}: one {trace.source} step")
    for name, number in tracks.items():
        yield _event("M", "thread_name", number, name=name)
        yield _event("M", "thread_sort_index", number, sort_index=number)
    for bar in trace.bars:
        start_us, end_us = _microseconds(bar.start_s), _microseconds(bar.end_s)
        complete = _event("X", bar.what, tracks[bar.row], **({"of": bar.label} if bar.label else {}))
        yield complete | {"cat": bar.row, "ts": start_us, "dur": round(end_us - start_us, 3)}
    sizes, before = trace.memory.size_bytes.tolist(), -1
    for size_bytes, time_s in zip(sizes, trace.memory.times_s.tolist(), strict=False):
        if size_bytes != before:
            yield _counter("live bytes", size_bytes, time_s)
        before = size_bytes
    if sizes:  # the last value holds to the end
        yield _counter("live bytes", before, trace.step_s)
    yield _counter("budget", trace.budget_bytes, 0.0)
    yield _counter("budget", trace.budget_bytes, trace.step_s)


def _event(phase: str, event: str, thread: int, **arguments: str | int | float) -> dict[str, Any]:
    return {"ph": phase, "name": event, "pid": 1, "tid": thread, "args": arguments}


def _counter(name: str, size_bytes: int, time_s: float) -> dict[str, Any]:
    return _event("C", name, 0, bytes=size_bytes) | {"ts": _microseconds(time_s)}


def _microseconds(seconds: float) -> float:
    """Microseconds rounded to nanoseconds, so that rounding does not make adjacent events overlap."""
    return round(seconds * 1e6, 3)
