"""Shared parts of pictures: size, colours, units, axes, legends, and writing to a file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from poochplan.formats.files import write_atomic
from poochplan.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 10.0, 160
LEFT, RIGHT = 0.083, 0.985
INK, QUIET, PURPLE = "#222222", "#6B6B6B", "#8A1C7C"
# Okabe and Ito's palette: people with any colour vision can distinguish it, and in grey the lightness differs.
BLUE, SKY, GREEN, PINK = "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
ORANGE, AMBER, YELLOW = "#D55E00", "#F0A000", "#F0E442"
DASHED = (0, (4, 2))
DECISION_COLOURS = {"keep": BLUE, "swap": PINK, "recompute": AMBER}
HOLDER_COLOURS = {
    "activations, kept": BLUE,
    "activations, swapped": PINK,
    "activations, recomputed": AMBER,
    "activations": BLUE,
    "temporaries": SKY,
    "a replay under way": ORANGE,
    "workspace of the op": YELLOW,
    "inputs, there before": GREEN,
    "parameters": "#4D4D4D",
    "buffers": "#6E6E6E",
    "gradients": "#929292",
    "optimizer state": "#BDBDBD",
}
"""By the words of ``Holder.what``, in the order in which bars are stacked."""


def holder_colour(what: str) -> str:
    """The colour for a kind of holder in words. A kind with an unusual decision has the colour of the kind."""
    return HOLDER_COLOURS.get(what) or HOLDER_COLOURS.get(what.rpartition(", ")[0], "#E0E0E0")


def in_stacking_order(whats: Iterable[str]) -> list[str]:
    """The words in the order of ``HOLDER_COLOURS``, unknown ones last."""
    order = list(HOLDER_COLOURS)
    return sorted(whats, key=lambda what: (order.index(what) if what in order else len(order), what))


def new_figure(height_inches: float, headline: str, subtitle: str, left: float = LEFT) -> Figure:
    """A white figure of the common width, with these lines at its top. The first call loads matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, facecolor="white")
    figure.text(left, 1 - 0.32 / height_inches, headline, fontsize=12.5, fontweight="bold", color=INK)
    below = 1 - 0.42 / height_inches
    figure.text(left, below, subtitle, fontsize=8.5, color=QUIET, va="top", linespacing=1.45)
    return figure


def placed(figure: Figure, above_inches: float, below_inches: float, **more: float) -> dict[str, float]:
    """Where axes lie, as matplotlib's grids take it: this far from the figure's top and bottom. ``more`` goes over the
    usual sides, or beside them.
    """
    height_inches = figure.get_figheight()
    ends = {"top": 1 - above_inches / height_inches, "bottom": below_inches / height_inches}
    return {"left": LEFT, "right": RIGHT, **ends, **more}


def write_picture(figure: Figure, path: str | Path, *, force: bool = False) -> Path:
    """Writes a figure as PNG. It only replaces a file with ``force``."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DOTS_PER_INCH)
    return write_atomic(path, data.getvalue(), force=force)


def plain_axes(axes: Axes, *sides: str, grid: Literal["x", "y"] | None = None, x: str = "", y: str = "") -> None:
    """Removes the frame and its ticks except for the named sides, labels the axes, and draws grid lines for one."""
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color("#9A9A9A")
    axes.tick_params(colors=INK, labelsize=9, left="left" in sides, bottom="bottom" in sides)
    if grid is not None:
        axes.grid(axis=grid, color="#E6E6E6", linewidth=0.7)
        axes.set_axisbelow(True)


def level(axes: Axes, what: str, size_bytes: int, factor: int, **style: Any) -> None:
    """Draws bytes as a line across the axes, with them in its label."""
    usual: dict[str, Any] = {"color": INK, "linewidth": 1.1}
    axes.axhline(size_bytes / factor, label=f"{what} {format_bytes(size_bytes)}", **(usual | style))


def squares(axes: Axes, colours: Mapping[str, str]) -> None:
    """Gives the axes these labels of colours, for a legend."""
    for label, colour in colours.items():
        axes.broken_barh([], (0, 0), color=colour, label=label)


def legend(figure: Figure, axes: Axes, columns: int, left: float = LEFT, *, above: bool = False, **style: Any) -> None:
    """Draws the labels of the axes in rows from ``left`` on, at the figure's bottom or ``above`` the axes.

    Labels of what is impossible come last.
    """
    from matplotlib.lines import Line2D

    named = zip(*axes.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(named, key=lambda pair: pair[1].startswith(("no plan", "proven"))), strict=True)
    height_inches = figure.get_figheight()
    middle = 1 - 0.78 / height_inches if above else 0.24 / height_inches
    usual: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (left, middle), "columnspacing": 1.5}
    usual |= {"borderpad": 0, "borderaxespad": 0, "frameon": False, "fontsize": 8.5, "handletextpad": 0.5}
    usual |= {"handlelength": 1.9 if any(isinstance(one, Line2D) for one in handles) else 1.0, "handleheight": 0.9}
    figure.legend(handles, labels, ncols=columns, **(usual | style))


def byte_unit(size_bytes: int, least: int = 2) -> tuple[int, str]:
    """The largest unit of which an axis of that length has at least ``least``: its bytes and name."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= least << power:
            return 1 << power, unit
    return 1, "B"


def shortened(text: str, most: int) -> str:
    """The text in at most this many characters. Its end stays, because it distinguishes layers."""
    return text if len(text) <= most else f"…{text[1 - most :]}"
