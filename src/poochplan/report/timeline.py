"""A picture of one planned step: what each stream does, and live memory, over time."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from poochplan.formats.files import write_atomic
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.simulator.streams import Lane
from poochplan.units import format_bytes, format_seconds, share_of_peak

from .layer_table import simulate_plan
from .memory import MemoryCurve, in_core_curve
from .tables import overhead_text, runtime_text, swapped_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any colour vision, and in grey by their order of lightness.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#BBBBBB",
    "replay": "#F0A000",
    "stall": "#D55E00",
    "runtime": "#F0E442",
    "swap out": "#CC79A7",
    "swap in": "#009E73",
}
ROWS = ("in-core", "compute", "swap out", "swap in")
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 10.0, 5.6, 160
LEFT = 0.083
_INK, _QUIET, _BLUE = "#222222", "#6B6B6B", "#0072B2"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Bar:
    """One stretch of a row of the picture."""

    row: str
    """One of ``ROWS``."""
    what: str
    """A key of ``COLOURS``."""
    start_s: float
    end_s: float
    label: str = ""
    """The values that are moved, waited for or recomputed."""


@dataclass(frozen=True)
class Timeline:
    """All that the picture shows."""

    workload: str
    budget_bytes: int
    overhead: float
    bars: tuple[Bar, ...]
    memory: MemoryCurve
    in_core_memory: MemoryCurve
    static_bytes: int
    """Bytes that live all step long."""
    peak_layer: str
    subtitle: str
    measured_peak_bytes: int | None = None
    measured_overhead: float | None = None

    @property
    def step_s(self) -> float:
        """Of the planned step; the in-core one beside it may be longer."""
        return float(self.memory.times_s[-1])


def timeline_of(
    profile: Profile,
    plan: Plan,
    *,
    measured_peak_bytes: int | None = None,
    measured_overhead: float | None = None,
) -> Timeline:
    """The simulated step of a plan; raises ``ModelMismatchError`` when it was made from another profile."""
    simulation = simulate_plan(profile, plan)
    starts_s = simulation.tick_start_s
    boundaries_s = _phase_starts(profile, [float(starts_s[tick]) for tick in profile.op_ticks])
    bars = list(_in_core_bars(profile))
    for span in simulation.trace:
        if span.lane is Lane.COMPUTE:
            bars += _split("compute", span.start_s, span.end_s, boundaries_s)
        elif span.lane in (Lane.STALL, Lane.REPLAY, Lane.RUNTIME):
            bars.append(Bar("compute", str(span.lane), span.start_s, span.end_s, span.label))
        else:
            row = "swap out" if span.lane is Lane.OUT else "swap in"
            bars.append(Bar(row, row, span.start_s, span.end_s, span.label))
    prediction = plan.prediction
    return Timeline(
        workload=plan.workload,
        budget_bytes=plan.budget_bytes,
        overhead=prediction.overhead,
        bars=tuple(bars),
        memory=MemoryCurve(np.append(starts_s, simulation.step_s), simulation.memory_bytes),
        in_core_memory=in_core_curve(profile),
        static_bytes=sum(static_bytes(profile).values()),
        peak_layer=simulation.peak_layer,
        subtitle=f"step {format_seconds(prediction.step_s)}, {prediction.in_core_text};  "
        f"stall {format_seconds(prediction.stall_s)}, replay {format_seconds(prediction.replay_s)}, "
        f"interference {format_seconds(prediction.interference_s)}{runtime_text(prediction)};  "
        f"{swapped_text(prediction.out_bytes, prediction.in_bytes)}",
        measured_peak_bytes=measured_peak_bytes,
        measured_overhead=measured_overhead,
    )


def write_timeline(timeline: Timeline, path: str | Path, *, force: bool = False) -> Path:
    """Writes the picture as PNG, never over a file unless ``force``."""
    data = io.BytesIO()
    draw_timeline(timeline).savefig(data, format="png", dpi=DOTS_PER_INCH)
    return write_atomic(path, data.getvalue(), force=force)


def draw_timeline(timeline: Timeline) -> Figure:
    """The picture as a matplotlib figure: rows of the streams above live memory, on one time axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, facecolor="white")
    frame = {"left": LEFT, "right": 0.985, "top": 0.82, "bottom": 0.16, "hspace": 0.07}
    streams, memory = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1.0, 1.6), **frame})
    scale_s, unit = _unit(timeline.step_s)
    draw_streams(streams, timeline, scale_s)
    draw_memory(memory, timeline, scale_s)
    memory.set_xlabel(f"time in the step ({unit})", fontsize=9.5, color=_INK)
    memory.set_xlim(0, max(float(timeline.in_core_memory.times_s[-1]), *(bar.end_s for bar in timeline.bars)) / scale_s)
    figure.text(LEFT, 0.945, _title(timeline), fontsize=12.5, fontweight="bold", color=_INK)
    figure.text(LEFT, 0.905, timeline.subtitle, fontsize=8.5, color=_QUIET)
    _legend(figure, streams, y=0.86, handlelength=1.0, handleheight=0.9)
    _legend(figure, memory, y=0.035, handlelength=1.9)
    return figure


def draw_streams(axes: Axes, timeline: Timeline, scale_s: float) -> None:
    """One row per stream; a bar's colour says what it does. Each colour is labelled once, for a legend."""
    shown = [row for row in ROWS if any(bar.row == row for bar in timeline.bars)]
    for what, colour in COLOURS.items():
        label: str | None = what
        for row in shown:
            y = len(shown) - 1 - shown.index(row)
            height = 0.42 if row == "in-core" else 0.74
            stretches = [
                (bar.start_s / scale_s, (bar.end_s - bar.start_s) / scale_s)
                for bar in timeline.bars
                if bar.row == row and bar.what == what
            ]
            if stretches:
                axes.broken_barh(
                    stretches,
                    (y - height / 2, height),
                    facecolors=colour,
                    linewidth=0.4,
                    edgecolors=colour,
                    label=label,
                )
                label = None
    axes.set_yticks(range(len(shown)), labels=shown[::-1])
    axes.set_ylim(-0.55, len(shown) - 0.45)
    _quiet(axes, keep=())
    axes.tick_params(axis="both", length=0, labelbottom=False)


def draw_memory(axes: Axes, timeline: Timeline, scale_s: float) -> None:
    """Live bytes over time: in-core, planned, the budget and the peak."""
    planned, in_core, budget_bytes = timeline.memory, timeline.in_core_memory, timeline.budget_bytes
    factor, unit = _byte_unit(max(in_core.peak_bytes, budget_bytes))
    times, sizes = planned.times_s / scale_s, planned.size_bytes / factor
    axes.stairs(
        in_core.size_bytes / factor, in_core.times_s / scale_s, color=_QUIET, linewidth=1.1, baseline=None,
        linestyle=(0, (4, 2)), label=f"in-core, peak {format_bytes(in_core.peak_bytes)}",
    )  # fmt: skip
    axes.axhline(budget_bytes / factor, color=_INK, linewidth=1.1, label=f"budget {format_bytes(budget_bytes)}")
    axes.stairs(sizes, times, fill=True, color=_BLUE, alpha=0.18, linewidth=0)
    axes.stairs(
        sizes, times, color=_BLUE, linewidth=1.3, baseline=None,
        label=f"planned, peak {format_bytes(planned.peak_bytes)}",
    )  # fmt: skip
    if timeline.measured_peak_bytes is not None:
        axes.axhline(
            timeline.measured_peak_bytes / factor, color="#8A1C7C", linewidth=1.4, linestyle=(0, (1, 1.5)),
            label=f"measured peak {format_bytes(timeline.measured_peak_bytes)}",
        )  # fmt: skip
    if timeline.static_bytes:
        axes.axhspan(
            0, timeline.static_bytes / factor, color="#8C8C8C", alpha=0.35, linewidth=0,
            label=f"always live {format_bytes(timeline.static_bytes)}",
        )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(in_core.peak_bytes, planned.peak_bytes, budget_bytes) / factor)
    axes.set_ylabel(f"live memory ({unit})", fontsize=9.5, color=_INK)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    _quiet(axes, keep=("left", "bottom"))
    _mark_peak(axes, timeline, scale_s, factor)


def _mark_peak(axes: Axes, timeline: Timeline, scale_s: float, factor: int) -> None:
    """A dot at the planned peak, and the layer it is in."""
    x, y = timeline.memory.peak_s / scale_s, timeline.memory.peak_bytes / factor
    axes.plot([x], [y], marker="o", markersize=4.5, color=_INK, zorder=5)
    is_left = timeline.memory.peak_s < 0.6 * timeline.step_s
    axes.annotate(
        f"peak in {timeline.peak_layer}" if timeline.peak_layer else "peak",
        (x, y), xytext=(3 if is_left else -3, 6), textcoords="offset points", ha="left" if is_left else "right",
        fontsize=8, color=_INK, zorder=6,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
    )  # fmt: skip


def _title(timeline: Timeline) -> str:
    share = share_of_peak(timeline.budget_bytes, timeline.in_core_memory.peak_bytes)
    title = (
        f"{timeline.workload} within {share:.0%} of its memory: predicted overhead {overhead_text(timeline.overhead)}"
    )
    if timeline.measured_overhead is not None:
        title += f", measured {overhead_text(timeline.measured_overhead)}"
    return title


def _legend(figure: Figure, axes: Axes, *, y: float, **style: float) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="center left", bbox_to_anchor=(LEFT, y), ncols=len(handles), frameon=False, fontsize=8.5,
        columnspacing=1.5, handletextpad=0.5, borderpad=0, borderaxespad=0, **style,
    )  # fmt: skip


def _quiet(axes: Axes, keep: tuple[str, ...]) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color("#9A9A9A")
    axes.tick_params(colors=_INK, labelsize=9)


def _in_core_bars(profile: Profile) -> list[Bar]:
    ends_s = profile.plain_scale * np.cumsum([op.duration_s for op in profile.ops])
    starts_s = np.concatenate([[0.0], ends_s[:-1]])
    return _split("in-core", 0.0, float(ends_s[-1]), _phase_starts(profile, starts_s.tolist()))


def _phase_starts(profile: Profile, op_starts_s: list[float]) -> dict[str, float]:
    """Second at which each phase that the step has begins."""
    starts: dict[str, float] = {}
    for phase in Phase:
        first = next((index for index, op in enumerate(profile.ops) if op.phase is phase), None)
        if first is not None:
            starts[str(phase)] = op_starts_s[first] if starts else 0.0
    return starts


def _split(row: str, start_s: float, end_s: float, phase_starts_s: dict[str, float]) -> list[Bar]:
    """The stretch, cut where a phase begins."""
    phases = list(phase_starts_s.items())
    bars = []
    for index, (phase, begins_s) in enumerate(phases):
        ends_s = phases[index + 1][1] if index + 1 < len(phases) else float("inf")
        left, right = max(start_s, begins_s), min(end_s, ends_s)
        if right > left:
            bars.append(Bar(row, phase, left, right))
    return bars


def _unit(seconds: float) -> tuple[float, str]:
    return next(((factor, unit) for factor, unit in _UNITS if seconds >= 2 * factor), _UNITS[-1])


def _byte_unit(size_bytes: int) -> tuple[int, str]:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 2 << power:
            return 1 << power, unit
    return 1, "B"
