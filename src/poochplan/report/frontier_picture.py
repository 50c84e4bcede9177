"""The frontier as a picture: overhead against budget, one line for each policy."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poochplan.formats.files import write_atomic
from poochplan.planner.planning import ILP
from poochplan.planner.sweep import all_policies
from poochplan.units import format_bytes, share_of_peak

from .frontier import Frontier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is lost on white; markers and dashes tell apart what colour cannot.
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))
_MARKERS = "os^Dv<>PXph"
_ILP_COLOUR, _INK, _QUIET = "#0072B2", "#222222", "#6B6B6B"
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 10.0, 5.6, 160
LEFT, RIGHT, TOP = 0.083, 0.72, 0.835
_TICKS = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LINEAR_SHARE = 0.5
"""Length of the axis below the first tick that is not 0, in decades."""


def write_frontier_picture(frontier: Frontier, path: str | Path, *, force: bool = False) -> Path:
    """Writes the picture as PNG, never over a file unless ``force``."""
    data = io.BytesIO()
    draw_frontier(frontier).savefig(data, format="png", dpi=DOTS_PER_INCH)
    return write_atomic(path, data.getvalue(), force=force)


def draw_frontier(frontier: Frontier) -> Figure:
    """The picture as a matplotlib figure: overhead against budget, one line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, facecolor="white")
    axes = figure.subplots(gridspec_kw={"left": LEFT, "right": RIGHT, "top": TOP, "bottom": 0.135})
    _set_axes(axes, frontier)
    _draw_impossible(axes, frontier)
    for policy in frontier.policies:
        _draw_line(axes, frontier, policy)
    figure.text(LEFT, 0.945, f"{frontier.workload}: what less memory costs", fontsize=12.5, fontweight="bold",
                color=_INK)  # fmt: skip
    figure.text(LEFT, 0.925, frontier.subtitle, fontsize=8.5, color=_QUIET, va="top", linespacing=1.45)
    _draw_legend(figure, axes)
    return figure


def _set_axes(axes: Axes, frontier: Frontier) -> None:
    """Overhead on an axis that is linear near 0 and logarithmic above; budgets as bytes and as shares."""
    factor, unit = _byte_unit(frontier.in_core_peak_bytes)
    known = [p.overhead for p in frontier.points if p.overhead is not None]
    known += [p.bound_overhead for p in frontier.points if p.bound_overhead is not None]
    least = min((value for value in known if value > 1e-6), default=0.01)
    linear = max((tick for tick in _TICKS[1:] if tick <= least), default=_TICKS[1])
    top = max([*known, 2 * linear]) * 1.25
    axes.set_yscale("symlog", linthresh=linear, linscale=_LINEAR_SHARE)
    bottom = min(-0.08 * linear, 1.25 * min(known, default=0.0))  # a step from an arena may be the shorter one
    axes.set_ylim(bottom, top)
    ticks = [sign * tick for sign in (-1, 1) for tick in _TICKS if tick >= linear]
    ticks = sorted({0.0, *(tick for tick in ticks if bottom <= tick <= top)})
    axes.set_yticks(ticks, labels=[f"{tick:.3g}%" for tick in (100 * tick for tick in ticks)])
    axes.set_yticks([], minor=True)
    first, last = min(frontier.budgets[0], frontier.smallest_budget_bytes), max(frontier.budgets)
    room = max(last - first, 1) * 0.05
    axes.set_xlim((first - room) / factor, (last + room) / factor)
    axes.set_xlabel(f"budget ({unit}, and share of the in-core peak)", fontsize=9.5, color=_INK)
    axes.set_ylabel("overhead beside the in-core step", fontsize=9.5, color=_INK)
    shown = _apart(frontier.budgets, (last - first) * 0.085)
    axes.set_xticks(
        [size / factor for size in shown],
        labels=[f"{size / factor:.3g}\n{share_of_peak(size, frontier.in_core_peak_bytes):.0%}" for size in shown],
    )
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#9A9A9A")
    axes.tick_params(colors=_INK, labelsize=9)


def _draw_impossible(axes: Axes, frontier: Frontier) -> None:
    """Budgets that no plan fits, and overheads that are proven out of reach."""
    factor, _ = _byte_unit(frontier.in_core_peak_bytes)
    left, _ = axes.get_xlim()
    smallest = frontier.smallest_budget_bytes / factor
    axes.axvspan(left, smallest, facecolor="#F0F0F0", edgecolor="#B5B5B5", hatch="////", linewidth=0,
                 label=f"no plan fits (below {format_bytes(frontier.smallest_budget_bytes)})", zorder=1)  # fmt: skip
    proven = [p for p in frontier.of(ILP) if p.bound_overhead is not None]
    if proven:
        budgets = [point.budget_bytes / factor for point in proven]
        bounds = [point.bound_overhead or 0.0 for point in proven]
        # A bound holds for every smaller budget too, and says nothing of a larger one: hence steps.
        axes.fill_between(budgets, axes.get_ylim()[0], bounds, step="pre", color=_ILP_COLOUR, alpha=0.10, linewidth=0,
                          zorder=2)  # fmt: skip
        axes.plot(budgets, bounds, drawstyle="steps-pre", color=_ILP_COLOUR, linewidth=1.2, linestyle=(0, (4, 2)),
                  label="proven lower bound", zorder=3)  # fmt: skip


def _draw_line(axes: Axes, frontier: Frontier, policy: str) -> None:
    """The policy's overhead; the line is broken where it finds no plan."""
    factor, _ = _byte_unit(frontier.in_core_peak_bytes)
    points = frontier.of(policy)
    found = [point for point in points if point.overhead is not None]
    label = policy
    if not found:
        label += ": finds no plan"
    elif found[0].budget_bytes > _first_with_a_plan(frontier):
        label += f" (from {share_of_peak(found[0].budget_bytes, frontier.in_core_peak_bytes):.0%})"
    overheads = [np.nan if point.overhead is None else point.overhead for point in points]
    axes.plot([point.budget_bytes / factor for point in points], overheads, label=label, **_style(policy))


def _first_with_a_plan(frontier: Frontier) -> int:
    return min(point.budget_bytes for point in frontier.points if point.overhead is not None)


def _style(policy: str) -> dict[str, Any]:
    """How a policy's line looks: the same in every picture, whichever policies are in it."""
    if policy == ILP:
        return {"color": _ILP_COLOUR, "linewidth": 3.0, "marker": "o", "markersize": 6, "zorder": 6}
    others = [name for name in all_policies() if name != ILP]
    place = others.index(policy) if policy in others else len(others)
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": _DASHES[place // len(_COLOURS) % len(_DASHES)],
        "linewidth": 1.4,
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4.5,
        "zorder": 4,
    }


def _draw_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: (labels[index].startswith(("no plan", "proven")), index))
    figure.legend(
        [handles[index] for index in order], [labels[index] for index in order], loc="upper left",
        bbox_to_anchor=(RIGHT + 0.012, TOP), frameon=False, fontsize=8.5, handlelength=3.2, labelspacing=0.75,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _apart(budgets: Sequence[int], distance: float) -> list[int]:
    """Budgets whose labels do not touch; the first and the last are among them."""
    shown = [budgets[0]]
    for size in budgets[1:-1]:
        if size - shown[-1] >= distance and budgets[-1] - size >= distance:
            shown.append(size)
    return list(dict.fromkeys([*shown, budgets[-1]]))


def _byte_unit(size_bytes: int) -> tuple[int, str]:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return 1 << power, unit
    return 1, "B"
