"""Who holds the peak: stacked bytes by layer, by kind and decision."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from poochplan.report.peak import PeakExplanation
from poochplan.units import format_bytes

from .palette import INK, QUIET, byte_unit, holder_colour, in_stacking_order, legend, new_figure, quiet, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYERS = 16
LONGEST_LABEL = 38
_LEFT, _RIGHT = 0.27, 0.985


def draw_peak(peak: PeakExplanation, *, layers: int = LAYERS) -> Figure:
    """One bar for each of the ``layers`` that hold most at the peak, and one for all others together."""
    rows = _rows(peak, layers)
    figure = new_figure(1.75 + 0.235 * len(rows))
    height = figure.get_figheight()
    axes = figure.subplots(
        gridspec_kw={"left": _LEFT, "right": _RIGHT, "top": 1 - 0.68 / height, "bottom": 0.92 / height}
    )
    factor, unit = byte_unit(max(sum(held.values()) for held in rows.values()))
    _draw_bars(axes, rows, factor)
    axes.set_xlabel(f"held at the peak ({unit})", fontsize=9.5, color=INK)
    budget = "" if peak.budget_bytes is None else f" within a budget of {format_bytes(peak.budget_bytes)}"
    title = f"{peak.workload}: who holds the peak of {format_bytes(peak.size_bytes)}{budget}"
    figure.text(0.02, 1 - 0.32 / height, title, fontsize=12.5, fontweight="bold", color=INK)
    of = "in-core step" if peak.budget_bytes is None else "planned step"
    figure.text(0.02, 1 - 0.55 / height, f"{of}: {shortened(peak.moment, 120)}", fontsize=8.5, color=QUIET)
    legend(figure, axes, 0.02, 0.24 / height, 4, handlelength=1.0, handleheight=0.9)
    return figure


def _rows(peak: PeakExplanation, layers: int) -> dict[str, dict[str, int]]:
    """Bytes by layer and kind; the layers that are not shown by themselves are one row."""
    held = peak.by_layer()
    rows = dict(list(held.items())[:layers])
    others = [held[layer] for layer in list(held)[layers:]]
    if others:
        rest: Counter[str] = Counter()
        for kinds in others:
            rest.update(kinds)
        rows[f"({len(others)} other layers)"] = dict(rest)
    return rows


def _draw_bars(axes: Axes, rows: dict[str, dict[str, int]], factor: int) -> None:
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
    axes.set_yticks(places, labels=[shortened(layer, LONGEST_LABEL) for layer in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.12 * max(lefts))
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    quiet(axes, keep=("bottom",))
    axes.tick_params(axis="y", length=0, labelsize=8)
