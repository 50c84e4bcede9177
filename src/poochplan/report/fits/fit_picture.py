"""A fit as a picture: what each value takes of the memory, and what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poochplan.fitting.fit import Fit
from poochplan.report.pictures.palette import BLUE, INK, LEFT, PURPLE, QUIET, byte_unit, new_figure, quiet
from poochplan.report.tables import overhead_text
from poochplan.units import format_bytes

from .fit_table import assumed_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_INCHES = 6.4
_ORANGE = "#D55E00"


def draw_fit(fit: Fit) -> Figure:
    """In-core and smallest possible peaks against the memory above; throughput and overhead below."""
    figure = new_figure(HEIGHT_INCHES)
    frame = {"left": LEFT, "right": 0.97, "top": 0.855, "bottom": 0.085, "hspace": 0.16}
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw=frame)
    _draw_bytes(upper, fit)
    _draw_throughput(lower, fit)
    lower.set_xlabel(fit.parameter, fontsize=9.5, color=INK)
    title = f"{fit.workload}: {fit.parameter} within {format_bytes(fit.budget_bytes)}"
    figure.text(LEFT, 0.945, title, fontsize=12.5, fontweight="bold", color=INK)
    figure.text(LEFT, 0.93, _subtitle(fit), fontsize=8.5, color=QUIET, va="top")
    return figure


def _subtitle(fit: Fit) -> str:
    in_core = "none in-core" if fit.in_core_value is None else f"largest in-core {fit.in_core_value}"
    best = "" if fit.best is None else f"; best throughput at {fit.best}"
    sizes = f"{assumed_text(fit).strip()}\n" if fit.assumed else ""
    return f"{sizes}largest {fit.value}, {in_core}{best}; {fit.profile.device.name}, link {fit.profile.link.name}"


def _draw_bytes(axes: Axes, fit: Fit) -> None:
    rungs = [*fit.rungs, *([fit.following] if fit.following is not None else [])]
    values = [rung.value for rung in rungs]
    factor, unit = byte_unit(max(rung.in_core_peak_bytes for rung in rungs))
    for label, colour, marker, sizes in (
        ("everything kept", _ORANGE, "s", [rung.in_core_peak_bytes for rung in rungs]),
        ("smallest possible peak", BLUE, "o", [rung.smallest_peak_bytes for rung in rungs]),
    ):
        axes.plot(values, [size / factor for size in sizes], color=colour, marker=marker, markersize=5, label=label)
    axes.axhline(fit.budget_bytes / factor, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="the memory")
    axes.set_ylabel(f"peak ({unit})", fontsize=9.5, color=INK)
    axes.set_ylim(bottom=0)
    _finish(axes)


def _draw_throughput(axes: Axes, fit: Fit) -> None:
    known = [rung for rung in fit.rungs if rung.items_per_s is not None]
    values, rates = [rung.value for rung in known], [rung.items_per_s or 0.0 for rung in known]
    axes.plot(values, rates, color=PURPLE, marker="o", markersize=5, label=f"{fit.unit} per second under the plan")
    for rung, rate in zip(known, rates, strict=True):
        text = overhead_text(rung.overhead or 0.0)
        axes.annotate(
            text, (rung.value, rate), (0, 8), textcoords="offset points", ha="center", fontsize=8, color=QUIET
        )
    axes.set_ylabel(f"{fit.unit}/s, and overhead", fontsize=9.5, color=INK)
    axes.set_ylim(0, 1.25 * max(rates, default=1.0))
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8.5)
    quiet(axes, keep=("left", "bottom"))
