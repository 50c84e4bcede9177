"""Live memory over one step: measured against predicted, the budget, and who holds the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.report.inspection.step_trace import COMPUTE, STEP, StepTrace, predicted_trace
from poochplan.report.memory import MemoryCurve, in_core_curve
from poochplan.report.peak import PeakExplanation, explain_peak
from poochplan.units import format_bytes

from .palette import BLUE, INK, LEFT, PURPLE, QUIET, byte_unit, holder_colour, legend, new_figure, quiet, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS, LAYERS = 6, 7
"""Rows of the two lists of holders."""
LONGEST_LABEL = 30


@dataclass(frozen=True)
class StepMemory:
    """All that the picture shows. Times are those of the predicted step, in seconds."""

    workload: str
    budget_bytes: int
    predicted: MemoryCurve
    measured: MemoryCurve | None
    """Each op where it was predicted to be, so that one can be held against the other. Where the two steps have other
    ops, phases are stretched to the lengths that they were predicted to have."""
    in_core: MemoryCurve
    """As the predicted step, without the plan's waits and replays."""
    phases: tuple[tuple[str, float, float], ...]
    """Name, begin and end of each."""
    peak: PeakExplanation


def step_memory_of(profile: Profile, plan: Plan, measured: StepTrace | None = None) -> StepMemory:
    """The predicted step of a plan beside the measured one (``poochplan.tracing.traced_step``), where there is one.

    Raises ``ModelMismatchError`` when the plan was made from another profile.
    """
    predicted = predicted_trace(profile, plan)
    peak_bytes = None if measured is None else measured.memory.peak_bytes
    in_core = in_core_curve(profile)
    return StepMemory(
        workload=plan.workload,
        budget_bytes=plan.budget_bytes,
        predicted=predicted.memory,
        measured=None if measured is None else _aligned(measured, predicted),
        in_core=in_core,
        phases=tuple((bar.what, bar.start_s, bar.end_s) for bar in predicted.bars if bar.row == STEP),
        peak=explain_peak(profile, plan, measured_peak_bytes=peak_bytes),
    )


def draw_step_memory(shown: StepMemory) -> Figure:
    """The picture as a matplotlib figure: live bytes over the step, and beside it the holders at the peak."""
    figure = new_figure(4.6)
    frame = {"left": LEFT, "right": 0.985, "top": 0.80, "bottom": 0.20}
    grid = figure.add_gridspec(
        2, 2, width_ratios=(2.3, 1.0), height_ratios=(KINDS, LAYERS), wspace=0.62, hspace=0.42, **frame
    )
    memory = figure.add_subplot(grid[:, 0])
    _draw_memory(memory, shown)
    kinds = dict(list(shown.peak.by_kind().items())[:KINDS])
    layers = {layer: sum(held.values()) for layer, held in list(shown.peak.by_layer().items())[:LAYERS]}
    _draw_holders(figure.add_subplot(grid[0, 1]), "held at the peak by", kinds, [holder_colour(kind) for kind in kinds])
    _draw_holders(figure.add_subplot(grid[1, 1]), "the layers that hold most", layers, [BLUE] * len(layers))
    figure.text(LEFT, 0.93, f"{shown.workload}: live memory over one step", fontsize=12.5, fontweight="bold", color=INK)
    figure.text(LEFT, 0.885, f"predicted peak in {shortened(shown.peak.moment, 110)}", fontsize=8.5, color=QUIET)
    legend(figure, memory, LEFT, 0.05, 4, handlelength=1.9)
    return figure


def _draw_memory(axes: Axes, shown: StepMemory) -> None:
    predicted, measured = shown.predicted, shown.measured
    in_core_bytes = shown.in_core.peak_bytes
    factor, unit = byte_unit(max(in_core_bytes, shown.budget_bytes))
    end_s = float(predicted.times_s[-1]) or 1.0
    axes.axhline(in_core_bytes / factor, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)),
                 label=f"in-core peak {format_bytes(in_core_bytes)}")  # fmt: skip
    axes.axhline(
        shown.budget_bytes / factor, color=INK, linewidth=1.2, label=f"budget {format_bytes(shown.budget_bytes)}"
    )
    places, sizes = predicted.times_s / end_s, predicted.size_bytes / factor
    axes.stairs(sizes, places, fill=True, color=BLUE, alpha=0.18, linewidth=0)
    axes.stairs(sizes, places, color=BLUE, linewidth=1.3, baseline=None,
                label=f"predicted, peak {format_bytes(predicted.peak_bytes)}")  # fmt: skip
    if measured is not None and measured.size_bytes.size:
        axes.stairs(measured.size_bytes / factor, measured.times_s / end_s, color=PURPLE, linewidth=1.1, baseline=None,
                    label=f"measured, peak {format_bytes(measured.peak_bytes)}", zorder=4)  # fmt: skip
    axes.plot(
        [predicted.peak_s / end_s], [predicted.peak_bytes / factor], marker="o", markersize=4.5, color=INK, zorder=5
    )
    axes.set_ylim(0, 1.08 * max(in_core_bytes, predicted.peak_bytes, shown.budget_bytes) / factor)
    axes.set_xlim(0, 1)
    for _, begin_s, _ in shown.phases[1:]:
        axes.axvline(begin_s / end_s, color="#C9C9C9", linewidth=0.8)
    names = [
        (name, (begin_s + stop_s) / 2 / end_s)
        for name, begin_s, stop_s in shown.phases
        if stop_s - begin_s > 0.08 * end_s
    ]
    axes.set_xticks([place for _, place in names], labels=[name for name, _ in names])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("one step, each op where it was predicted", fontsize=9.5, color=INK)
    axes.set_ylabel(f"live memory ({unit})", fontsize=9.5, color=INK)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    quiet(axes, keep=("left", "bottom"))


def _draw_holders(axes: Axes, title: str, sizes: dict[str, int], colours: list[str]) -> None:
    """One bar for each, with its bytes behind it."""
    rows = range(len(sizes) - 1, -1, -1)
    axes.barh(rows, list(sizes.values()), height=0.66, color=colours)
    axes.set_yticks(list(rows), labels=[shortened(name, LONGEST_LABEL) for name in sizes])
    most = max(sizes.values(), default=1)
    for row, size_bytes in zip(rows, sizes.values(), strict=True):
        axes.text(size_bytes + 0.03 * most, row, format_bytes(size_bytes), va="center", fontsize=7.5, color=QUIET)
    axes.set_xlim(0, 1.5 * most)
    axes.set_xticks([])
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    quiet(axes, keep=())
    axes.tick_params(axis="y", length=0, labelsize=7.5)


def _aligned(measured: StepTrace, predicted: StepTrace) -> MemoryCurve:
    """The measured curve with what both steps have at the predicted times: ops, else phases, else the whole."""
    curve = measured.memory
    by_op = _anchors(_ops(measured), _ops(predicted))
    found_s, wanted_s = by_op or _anchors(_phases(measured), _phases(predicted)) or _WHOLE
    times_s = np.interp(curve.times_s, [*found_s, measured.step_s], [*wanted_s, predicted.step_s])
    return MemoryCurve(np.maximum.accumulate(times_s), curve.size_bytes)


_WHOLE = ([0.0], [0.0])


def _anchors(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> tuple[list[float], list[float]] | None:
    """Seconds at which each of the wanted begins, found and wanted; None where not all are found in that order.

    A measured step has further ops: those with which the runtime takes and gives memory.
    """
    left = iter(found)
    begins_s = []
    for name, _ in wanted:
        begin_s = next((begin_s for other, begin_s in left if other == name), None)
        if begin_s is None:
            return None
        begins_s.append(begin_s)
    return begins_s, [begin_s for _, begin_s in wanted]


def _phases(trace: StepTrace) -> list[tuple[str, float]]:
    """Names, and seconds at which they begin."""
    return [(bar.what, bar.start_s) for bar in trace.bars if bar.row == STEP]


def _ops(trace: StepTrace) -> list[tuple[str, float]]:
    """The same of the step's own ops; those of replays lie inside of these, and are left out."""
    found = []
    replayed_until_s = -1.0
    for bar in trace.bars:
        if bar.row != COMPUTE or bar.what == "stall":
            continue
        if bar.what == "replay":
            replayed_until_s = max(replayed_until_s, bar.end_s)
        elif bar.start_s >= replayed_until_s:
            found.append((bar.what, bar.start_s))
    return found
