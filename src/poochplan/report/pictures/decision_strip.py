"""What plans decide, as strips: layers in the order in which they save, bytes as width, decisions as colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.queries import OUTSIDE
from poochplan.report.layer_table import decision_totals
from poochplan.units import format_bytes, share_of_peak

from .palette import DECISION_COLOURS, INK, LEFT, QUIET, byte_unit, legend, new_figure, quiet, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_LABELLED = 0.013
"""Share of the strip below which a layer has no room for its name."""
LONGEST_LABEL = 30
LEAST_PARTED = 0.004
"""Share below which no line parts a layer from the one before."""
_STRIP_INCHES, _ABOVE_INCHES, _BELOW_INCHES = 0.72, 0.95, 1.95


def draw_decisions(plans: Plan | Sequence[Plan]) -> Figure:
    """One strip for a plan; of several plans of one step, one below the other, each with its budget."""
    listed = [plans] if isinstance(plans, Plan) else list(plans)
    height = _ABOVE_INCHES + _BELOW_INCHES + _STRIP_INCHES * len(listed)
    figure = new_figure(height)
    frame = {"left": LEFT, "right": 0.985, "top": 1 - _ABOVE_INCHES / height, "bottom": _BELOW_INCHES / height}
    axes = figure.subplots(gridspec_kw=frame)
    total_bytes = max(1, *(sum(value.size_bytes for value in plan.values) for plan in listed))
    factor, unit = byte_unit(total_bytes)
    for row, plan in enumerate(reversed(listed)):
        _draw_strip(axes, plan, row, factor)
        _part_layers(axes, plan, row, factor, LEAST_PARTED * total_bytes)
    _label_colours(axes, listed)
    _set_axes(axes, listed, total_bytes, factor)
    figure.text(LEFT, 1 - 0.32 / height, _title(listed), fontsize=12.5, fontweight="bold", color=INK)
    subtitle = f"{format_bytes(total_bytes)} that autograd saves, in the order of forward; width is bytes ({unit})"
    figure.text(LEFT, 1 - 0.54 / height, subtitle, fontsize=8.5, color=QUIET)
    legend(figure, axes, LEFT, 1 - 0.78 / height, 3, handlelength=1.0, handleheight=0.9)
    return figure


def _title(plans: list[Plan]) -> str:
    if len(plans) > 1:
        return f"{plans[0].workload}: decisions by layer within {len(plans)} budgets"
    (plan,) = plans
    share = share_of_peak(plan.budget_bytes, plan.prediction.in_core_peak_bytes)
    return f"{plan.workload} within {format_bytes(plan.budget_bytes)} ({share:.0%} of in-core): decisions by layer"


def _draw_strip(axes: Axes, plan: Plan, row: int, factor: int) -> None:
    """One bar for each value."""
    stretches: dict[str, list[tuple[float, float]]] = {str(decision): [] for decision in Decision}
    place = 0
    for value in plan.values:
        stretches[value.decision].append((place / factor, value.size_bytes / factor))
        place += value.size_bytes
    for decision, bars in stretches.items():
        colour = DECISION_COLOURS[decision]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.3)


def _part_layers(axes: Axes, plan: Plan, row: int, factor: int, least_bytes: float) -> None:
    """A thin white line before each layer that has room for one."""
    for _, begin, end in _layers(plan):
        if begin and end - begin >= least_bytes:
            axes.vlines(begin / factor, row - 0.4, row + 0.4, color="white", linewidth=0.6)


def _label_colours(axes: Axes, plans: list[Plan]) -> None:
    """Handles of the legend; of one plan with the bytes of each decision."""
    sizes = decision_totals(plans[0])["size_bytes"].to_dict()
    for decision, colour in DECISION_COLOURS.items():
        size = f" {format_bytes(sizes[decision])}" if len(plans) == 1 else ""
        axes.broken_barh([], (0, 0), facecolors=colour, label=f"{decision}{size}")


def _set_axes(axes: Axes, plans: list[Plan], total_bytes: int, factor: int) -> None:
    """Names of the layers that have room for it below the lowest strip; budgets at the left where there are several."""
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
    quiet(axes, keep=())
    axes.tick_params(axis="x", length=2, labelsize=7.5, labelrotation=90)
    axes.tick_params(axis="y", length=0)


def _layers(plan: Plan) -> list[tuple[str, int, int]]:
    """Layer, first and last byte of each stretch of values that one layer saves."""
    found, place = [], 0
    for layer, values in groupby(plan.values, key=lambda value: value.layer or OUTSIDE):
        size_bytes = sum(value.size_bytes for value in values)
        found.append((layer, place, place + size_bytes))
        place += size_bytes
    return found
