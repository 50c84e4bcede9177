"""Pictures of a step's memory, of the holders of its peak, and of decisions, as matplotlib figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from poochplan.formats.occupancy import COMPUTE, STEP, MemoryCurve, StepTrace
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.peak import PeakExplanation, explain_peak
from poochplan.units import format_bytes, share_of_peak

from .palette import (
    BLUE,
    DECISION_COLOURS,
    INK,
    LEFT,
    PURPLE,
    QUIET,
    byte_unit,
    holder_colour,
    in_stacking_order,
    legend,
    new_figure,
    plain_axes,
    shortened,
    title,
    write_picture,
)
from .timeline import draw_live, in_core_curve, predicted_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["StepMemory", "draw_decisions", "draw_peak", "draw_step_memory", "step_memory_of", "write_picture"]

MOST_KINDS, MOST_LAYERS, PEAK_LAYERS = 6, 7, 16
"""Most rows in the lists of holders next to a step's memory, and in the picture of the peak."""
LONGEST_LABEL = 30
LEAST_LABELLED = 0.013
"""A layer with a smaller share of a strip has no room for its name."""
LEAST_PARTED = 0.004
"""A layer with a smaller share of a strip has no line before it."""
_STRIP_INCHES, _ABOVE_INCHES, _BELOW_INCHES = 0.72, 0.95, 1.95


@dataclass(frozen=True)
class StepMemory:
    """The data of the picture. Times are those of the predicted step, in seconds."""

    predicted: MemoryCurve
    measured: MemoryCurve | None
    """The measured curve, with each op at its predicted time, for comparison. If the two steps have different ops,
    phases are stretched to their predicted lengths."""
    in_core: MemoryCurve
    """The predicted step without the plan's waits and replays."""
    phases: tuple[tuple[str, float, float], ...]
    """Name, beginning and end of each phase."""
    peak: PeakExplanation
    """Also has the workload and the budget."""


def step_memory_of(profile: Profile, plan: Plan, measured: StepTrace | None = None) -> StepMemory:
    """The predicted step of a plan and, if given, the measured one (``poochplan.tracing.traced_step``).

    Raises ``ModelMismatchError`` if the plan was made from another profile.
    """
    predicted = predicted_trace(profile, plan)
    peak_bytes = None if measured is None else measured.memory.peak_bytes
    return StepMemory(
        predicted=predicted.memory,
        measured=None if measured is None else _aligned(measured, predicted),
        in_core=in_core_curve(profile),
        phases=tuple((bar.what, bar.start_s, bar.end_s) for bar in predicted.bars if bar.row == STEP),
        peak=explain_peak(profile, plan, measured_peak_bytes=peak_bytes),
    )


def draw_step_memory(shown: StepMemory) -> Figure:
    """A figure of live bytes over the step, and next to it the holders at the peak."""
    figure = new_figure(4.6)
    frame = {"left": LEFT, "right": 0.985, "top": 0.80, "bottom": 0.20}
    grid = figure.add_gridspec(
        2, 2, width_ratios=(2.3, 1.0), height_ratios=(MOST_KINDS, MOST_LAYERS), wspace=0.62, hspace=0.42, **frame
    )
    memory = figure.add_subplot(grid[:, 0])
    _draw_memory(memory, shown)
    kinds = dict(list(shown.peak.by_kind().items())[:MOST_KINDS])
    layers = {layer: sum(held.values()) for layer, held in list(shown.peak.by_layer().items())[:MOST_LAYERS]}
    _draw_holders(figure.add_subplot(grid[0, 1]), "held at the peak by", kinds, [holder_colour(kind) for kind in kinds])
    _draw_holders(figure.add_subplot(grid[1, 1]), "the layers that hold most", layers, [BLUE] * len(layers))
    subtitle = f"predicted peak in {shortened(shown.peak.moment, 110)}"
    title(figure, f"{shown.peak.workload}: live memory over one step", subtitle, LEFT, 0.93, 0.885)
    legend(figure, memory, LEFT, 0.05, 4, handlelength=1.9)
    return figure


def _draw_memory(axes: Axes, shown: StepMemory) -> None:
    predicted, measured = shown.predicted, shown.measured
    in_core_bytes, budget_bytes = shown.in_core.peak_bytes, shown.peak.budget_bytes or 0
    factor, unit = byte_unit(max(in_core_bytes, budget_bytes))
    end_s = float(predicted.times_s[-1]) or 1.0
    in_core = f"in-core peak {format_bytes(in_core_bytes)}"
    axes.axhline(in_core_bytes / factor, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)), label=in_core)
    draw_live(axes, predicted, budget_bytes, end_s, factor, "predicted")
    if measured is not None and measured.size_bytes.size:
        axes.stairs(measured.size_bytes / factor, measured.times_s / end_s, color=PURPLE, linewidth=1.1, baseline=None,
                    label=f"measured, peak {format_bytes(measured.peak_bytes)}", zorder=4)  # fmt: skip
    axes.set_ylim(0, 1.08 * max(in_core_bytes, predicted.peak_bytes, budget_bytes) / factor)
    axes.set_xlim(0, 1)
    for _, begin_s, _ in shown.phases[1:]:
        axes.axvline(begin_s / end_s, color="#C9C9C9", linewidth=0.8)
    named = [phase for phase in shown.phases if phase[2] - phase[1] > 0.08 * end_s]
    places = [(begin_s + stop_s) / 2 / end_s for _, begin_s, stop_s in named]
    axes.set_xticks(places, labels=[name for name, _, _ in named])
    axes.tick_params(axis="x", length=0)
    x = "one step, each op where it was predicted"
    plain_axes(axes, "left", "bottom", grid="y", x=x, y=f"live memory ({unit})")


def _draw_holders(axes: Axes, heading: str, sizes: dict[str, int], colours: list[str]) -> None:
    rows = range(len(sizes) - 1, -1, -1)
    axes.barh(rows, list(sizes.values()), height=0.66, color=colours)
    axes.set_yticks(list(rows), labels=[shortened(name, LONGEST_LABEL) for name in sizes])
    most = max(sizes.values(), default=1)
    for row, size_bytes in zip(rows, sizes.values(), strict=True):
        axes.text(size_bytes + 0.03 * most, row, format_bytes(size_bytes), va="center", fontsize=7.5, color=QUIET)
    axes.set_xlim(0, 1.5 * most)
    axes.set_xticks([])
    axes.set_title(heading, loc="left", fontsize=9, color=INK)
    plain_axes(axes)
    axes.tick_params(axis="y", length=0, labelsize=7.5)


def _aligned(measured: StepTrace, predicted: StepTrace) -> MemoryCurve:
    """The measured curve stretched to the predicted times of ops if they match, else of phases, else as a whole."""
    curve = measured.memory
    by_op = _anchors(_ops(measured), _ops(predicted))
    found_s, wanted_s = by_op or _anchors(_phases(measured), _phases(predicted)) or _WHOLE
    times_s = np.interp(curve.times_s, [*found_s, measured.step_s], [*wanted_s, predicted.step_s])
    return MemoryCurve(np.maximum.accumulate(times_s), curve.size_bytes)


_WHOLE = ([0.0], [0.0])


def _anchors(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> tuple[list[float], list[float]] | None:
    """The times of the wanted names, found and wanted; None if not all are found in that order.

    A measured step has additional ops: those with which the runtime takes and releases memory.
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
    return [(bar.what, bar.start_s) for bar in trace.bars if bar.row == STEP]


def _ops(trace: StepTrace) -> list[tuple[str, float]]:
    """The same for the step's own ops, without those of replays, which lie inside them."""
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


def draw_peak(peak: PeakExplanation, *, layers: int = PEAK_LAYERS) -> Figure:
    """A figure with one bar for each of the ``layers`` that hold most at the peak, and one for all other layers."""
    rows = _layer_rows(peak, layers)
    figure = new_figure(1.75 + 0.235 * len(rows))
    height = figure.get_figheight()
    frame = {"left": 0.27, "right": 0.985, "top": 1 - 0.68 / height, "bottom": 0.92 / height}
    axes = figure.subplots(gridspec_kw=frame)
    factor, unit = byte_unit(max(sum(held.values()) for held in rows.values()))
    _draw_bars(axes, rows, factor, unit)
    budget = "" if peak.budget_bytes is None else f" within a budget of {format_bytes(peak.budget_bytes)}"
    headline = f"{peak.workload}: who holds the peak of {format_bytes(peak.size_bytes)}{budget}"
    of = "in-core step" if peak.budget_bytes is None else "planned step"
    subtitle = f"{of}: {shortened(peak.moment, 120)}"
    title(figure, headline, subtitle, 0.02, 1 - 0.32 / height, 1 - 0.55 / height)
    legend(figure, axes, 0.02, 0.24 / height, 4, handlelength=1.0, handleheight=0.9)
    return figure


def _layer_rows(peak: PeakExplanation, layers: int) -> dict[str, dict[str, int]]:
    """Bytes by layer and kind; all layers without a row of their own share one."""
    held = peak.by_layer()
    rows = dict(list(held.items())[:layers])
    others = [held[layer] for layer in list(held)[layers:]]
    if others:
        rest: Counter[str] = Counter()
        for kinds in others:
            rest.update(kinds)
        rows[f"({len(others)} other layers)"] = dict(rest)
    return rows


def _draw_bars(axes: Axes, rows: dict[str, dict[str, int]], factor: int, unit: str) -> None:
    places = list(range(len(rows) - 1, -1, -1))
    lefts = [0.0] * len(rows)
    for what in in_stacking_order({what for held in rows.values() for what in held}):
        widths = [held.get(what, 0) / factor for held in rows.values()]
        axes.barh(places, widths, left=lefts, height=0.72, color=holder_colour(what), label=what)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, held, end in zip(places, rows.values(), lefts, strict=True):
        axes.text(
            end + 0.006 * max(lefts), place, format_bytes(sum(held.values())), va="center", fontsize=7.5, color=QUIET
        )
    axes.set_yticks(places, labels=[shortened(layer, 38) for layer in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.12 * max(lefts))
    plain_axes(axes, "bottom", grid="x", x=f"held at the peak ({unit})")
    axes.tick_params(axis="y", length=0, labelsize=8)


def draw_decisions(plans: Plan | Sequence[Plan]) -> Figure:
    """A figure with one strip for each plan. Several plans must be for one step; their strips show the budgets."""
    listed = [plans] if isinstance(plans, Plan) else list(plans)
    height = _ABOVE_INCHES + _BELOW_INCHES + _STRIP_INCHES * len(listed)
    figure = new_figure(height)
    frame = {"left": LEFT, "right": 0.985, "top": 1 - _ABOVE_INCHES / height, "bottom": _BELOW_INCHES / height}
    axes = figure.subplots(gridspec_kw=frame)
    total_bytes = max(1, *(sum(value.size_bytes for value in plan.saved) for plan in listed))
    factor, unit = byte_unit(total_bytes)
    for row, plan in enumerate(reversed(listed)):
        _draw_strip(axes, plan, row, factor)
        for _, begin, end in _layers(plan):
            if begin and end - begin >= LEAST_PARTED * total_bytes:
                axes.vlines(begin / factor, row - 0.4, row + 0.4, color="white", linewidth=0.6)
    for decision, sizes in listed[0].decided().items():  # handles of the legend
        size = f" {format_bytes(sum(sizes))}" if len(listed) == 1 else ""
        axes.broken_barh([], (0, 0), facecolors=DECISION_COLOURS[decision], label=f"{decision}{size}")
    _set_axes(axes, listed, total_bytes, factor)
    subtitle = f"{format_bytes(total_bytes)} that autograd saves, in the order of forward; width is bytes ({unit})"
    title(figure, _decisions_title(listed), subtitle, LEFT, 1 - 0.32 / height, 1 - 0.54 / height)
    legend(figure, axes, LEFT, 1 - 0.78 / height, 3, handlelength=1.0, handleheight=0.9)
    return figure


def _decisions_title(plans: list[Plan]) -> str:
    if len(plans) > 1:
        return f"{plans[0].workload}: decisions by layer within {len(plans)} budgets"
    (plan,) = plans
    share = share_of_peak(plan.budget_bytes, plan.prediction.in_core_peak_bytes)
    return f"{plan.workload} within {format_bytes(plan.budget_bytes)} ({share:.0%} of in-core): decisions by layer"


def _draw_strip(axes: Axes, plan: Plan, row: int, factor: int) -> None:
    stretches: dict[str, list[tuple[float, float]]] = {str(decision): [] for decision in Decision}
    place = 0
    for value in plan.saved:
        stretches[value.decision].append((place / factor, value.size_bytes / factor))
        place += value.size_bytes
    for decision, bars in stretches.items():
        colour = DECISION_COLOURS[decision]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.3)


def _set_axes(axes: Axes, plans: list[Plan], total_bytes: int, factor: int) -> None:
    """Labels layers that have room below the lowest strip, and several plans by their budgets, at the left."""
    named = [
        (layer, (begin + end) / 2 / factor)
        for layer, begin, end in _layers(plans[0])
        if end - begin >= LEAST_LABELLED * total_bytes
    ]
    axes.set_xticks([place for _, place in named], labels=[shortened(layer, LONGEST_LABEL) for layer, _ in named])
    axes.set_xlim(0, total_bytes / factor)
    axes.set_ylim(-0.5, len(plans) - 0.5)
    shares = [f"{share_of_peak(plan.budget_bytes, plan.prediction.in_core_peak_bytes):.0%}" for plan in reversed(plans)]
    axes.set_yticks(range(len(plans)), labels=shares)
    plain_axes(axes)
    axes.tick_params(axis="x", length=2, labelsize=7.5, labelrotation=90)
    axes.tick_params(axis="y", length=0)


def _layers(plan: Plan) -> list[tuple[str, int, int]]:
    """Layer, first and last byte of each series of values that one layer saves."""
    found, place = [], 0
    for layer, values in groupby(plan.saved, key=lambda value: value.layer or OUTSIDE):
        size_bytes = sum(value.size_bytes for value in values)
        found.append((layer, place, place + size_bytes))
        place += size_bytes
    return found
