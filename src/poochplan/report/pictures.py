"""Pictures of a step's memory, of the holders of its peak, and of decisions, as matplotlib figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING

import numpy as np

from poochplan.formats.occupancy import COMPUTE, STEP, MemoryCurve, StepTrace
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.peak import PeakExplanation, explain_peak
from poochplan.units import format_bytes, share_of_peak

from . import palette
from .palette import write_picture
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
    subtitle = f"predicted peak in {palette.shortened(shown.peak.moment, 110)}"
    figure = palette.new_figure(4.6, f"{shown.peak.workload}: live memory over one step", subtitle)
    ratios = {"width_ratios": (2.3, 1.0), "height_ratios": (MOST_KINDS, MOST_LAYERS)}
    grid = figure.add_gridspec(2, 2, **ratios, **palette.placed(figure, 0.92, 0.92, wspace=0.62, hspace=0.42))
    memory = figure.add_subplot(grid[:, 0])
    _draw_memory(memory, shown)
    kinds = {kind: {kind: size_bytes} for kind, size_bytes in shown.peak.by_kind().items()}
    layers = shown.peak.by_layer()
    held = {"held at the peak by": (kinds, MOST_KINDS), "the layers that hold most": (layers, MOST_LAYERS)}
    for place, (heading, (rows, most)) in enumerate(held.items()):
        axes = figure.add_subplot(grid[place, 1], xticks=[])
        axes.set_title(heading, loc="left", fontsize=9, color=palette.INK)
        palette.plain_axes(axes)
        _draw_bars(axes, dict(islice(rows.items(), most)))
    palette.legend(figure, memory, 4)
    return figure


def _draw_memory(axes: Axes, shown: StepMemory) -> None:
    predicted, measured = shown.predicted, shown.measured
    in_core_bytes, budget_bytes = shown.in_core.peak_bytes, shown.peak.budget_bytes or 0
    factor, unit = palette.byte_unit(max(in_core_bytes, budget_bytes))
    end_s = float(predicted.times_s[-1]) or 1.0
    palette.level(axes, "in-core peak", in_core_bytes, factor, color=palette.QUIET, linestyle=palette.DASHED)
    draw_live(axes, predicted, budget_bytes, end_s, factor, "predicted")
    if measured is not None and measured.size_bytes.size:
        axes.stairs(measured.size_bytes / factor, measured.times_s / end_s, color=palette.PURPLE, linewidth=1.1,
                    baseline=None, label=f"measured, peak {format_bytes(measured.peak_bytes)}", zorder=4)  # fmt: skip
    axes.set_ylim(0, 1.08 * max(in_core_bytes, predicted.peak_bytes, budget_bytes) / factor)
    axes.set_xlim(0, 1)
    for _, begin_s, _ in shown.phases[1:]:
        axes.axvline(begin_s / end_s, color="#C9C9C9", linewidth=0.8)
    named = [phase for phase in shown.phases if phase[2] - phase[1] > 0.08 * end_s]
    places = [(begin_s + stop_s) / 2 / end_s for _, begin_s, stop_s in named]
    axes.set_xticks(places, labels=[name for name, _, _ in named])
    axes.tick_params(axis="x", length=0)
    x = "one step, each op where it was predicted"
    palette.plain_axes(axes, "left", "bottom", grid="y", x=x, y=f"live memory ({unit})")


def _draw_bars(axes: Axes, rows: dict[str, dict[str, int]], factor: int = 1, room: float = 1.5) -> None:
    """A bar for each row, the first one at the top: its name at the left, its kinds one behind the other, its bytes.

    The axis is ``room`` times as long as the longest bar.
    """
    most = max((sum(held.values()) for held in rows.values()), default=1) / factor
    for row, held in enumerate(rows.values()):
        end = 0.0
        for what in palette.in_stacking_order(held):
            axes.barh(row, held[what] / factor, left=end, height=0.7, color=palette.holder_colour(what))
            end += held[what] / factor
        size = format_bytes(sum(held.values()))
        axes.text(end + 0.015 * room * most, row, size, va="center", fontsize=7.5, color=palette.QUIET)
    axes.set_yticks(range(len(rows)), labels=[palette.shortened(name, LONGEST_LABEL) for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, room * most)
    axes.tick_params(axis="y", labelsize=7.5)


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
    budget = "" if peak.budget_bytes is None else f" within a budget of {format_bytes(peak.budget_bytes)}"
    headline = f"{peak.workload}: who holds the peak of {format_bytes(peak.size_bytes)}{budget}"
    of = "in-core step" if peak.budget_bytes is None else "planned step"
    subtitle = f"{of}: {palette.shortened(peak.moment, 120)}"
    figure = palette.new_figure(1.75 + 0.235 * len(rows), headline, subtitle, 0.02)
    axes = figure.subplots(gridspec_kw=palette.placed(figure, 0.68, 0.92, left=0.27))
    factor, unit = palette.byte_unit(max(sum(held.values()) for held in rows.values()))
    palette.plain_axes(axes, "bottom", grid="x", x=f"held at the peak ({unit})")
    _draw_bars(axes, rows, factor, 1.12)
    kinds = palette.in_stacking_order({what for held in rows.values() for what in held})
    palette.squares(axes, {what: palette.holder_colour(what) for what in kinds})
    palette.legend(figure, axes, 4, 0.02)
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


def draw_decisions(plans: Plan | Sequence[Plan]) -> Figure:
    """A figure with one strip for each plan. Several plans must be for one step; their strips show the budgets."""
    listed = [plans] if isinstance(plans, Plan) else list(plans)
    total_bytes = max(1, *(sum(value.size_bytes for value in plan.saved) for plan in listed))
    factor, unit = palette.byte_unit(total_bytes)
    subtitle = f"{format_bytes(total_bytes)} that autograd saves, in the order of forward; width is bytes ({unit})"
    height_inches = _ABOVE_INCHES + _BELOW_INCHES + _STRIP_INCHES * len(listed)
    figure = palette.new_figure(height_inches, _decisions_title(listed), subtitle)
    axes = figure.subplots(gridspec_kw=palette.placed(figure, _ABOVE_INCHES, _BELOW_INCHES))
    for row, plan in enumerate(reversed(listed)):
        _draw_strip(axes, plan, row, factor, LEAST_PARTED * total_bytes)
    decided = listed[0].decided().items()
    size = {decision: f" {format_bytes(sum(sizes))}" if len(listed) == 1 else "" for decision, sizes in decided}
    palette.squares(axes, {f"{one}{size[one]}": palette.DECISION_COLOURS[one] for one in size})
    _set_axes(axes, listed, total_bytes, factor)
    palette.legend(figure, axes, 3, above=True)
    return figure


def _decisions_title(plans: list[Plan]) -> str:
    if len(plans) > 1:
        return f"{plans[0].workload}: decisions by layer within {len(plans)} budgets"
    (plan,) = plans
    share = share_of_peak(plan.budget_bytes, plan.prediction.in_core_peak_bytes)
    return f"{plan.workload} within {format_bytes(plan.budget_bytes)} ({share:.0%} of in-core): decisions by layer"


def _draw_strip(axes: Axes, plan: Plan, row: int, factor: int, least_bytes: float) -> None:
    """Draws the saved values in order, and a line before each layer of at least that many bytes."""
    sizes = [value.size_bytes / factor for value in plan.saved]
    colours = [palette.DECISION_COLOURS[value.decision] for value in plan.saved]
    stretches = list(zip(accumulate(sizes, initial=0.0), sizes, strict=False))
    axes.broken_barh(stretches, (row - 0.4, 0.8), color=colours, linewidth=0.3)
    begins = [begin / factor for _, begin, end in _layers(plan) if begin and end - begin >= least_bytes]
    axes.vlines(begins, row - 0.4, row + 0.4, color="white", linewidth=0.6)


def _set_axes(axes: Axes, plans: list[Plan], total_bytes: int, factor: int) -> None:
    """Labels layers that have room below the lowest strip, and several plans by their budgets, at the left."""
    named = [
        (layer, (begin + end) / 2 / factor)
        for layer, begin, end in _layers(plans[0])
        if end - begin >= LEAST_LABELLED * total_bytes
    ]
    axes.set_xticks(
        [place for _, place in named], labels=[palette.shortened(layer, LONGEST_LABEL) for layer, _ in named]
    )
    axes.set_xlim(0, total_bytes / factor)
    axes.set_ylim(-0.5, len(plans) - 0.5)
    shares = [f"{share_of_peak(plan.budget_bytes, plan.prediction.in_core_peak_bytes):.0%}" for plan in reversed(plans)]
    axes.set_yticks(range(len(plans)), labels=shares)
    palette.plain_axes(axes)
    axes.tick_params(axis="x", labelsize=7.5, labelrotation=90)


def _layers(plan: Plan) -> list[tuple[str, int, int]]:
    """Layer, first and last byte of each series of values that one layer saves."""
    found, place = [], 0
    for layer, values in groupby(plan.saved, key=lambda value: value.layer or OUTSIDE):
        size_bytes = sum(value.size_bytes for value in values)
        found.append((layer, place, place + size_bytes))
        place += size_bytes
    return found
