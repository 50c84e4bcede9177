"""Shared parts of pictures: size, colours, units, axes, legends, and writing to a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from poochplan.formats.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 10.0, 160
LEFT = 0.083
INK, QUIET, BLUE, PURPLE, ORANGE = "#222222", "#6B6B6B", "#0072B2", "#8A1C7C", "#D55E00"
DECISION_COLOURS = {"keep": BLUE, "swap": "#CC79A7", "recompute": "#F0A000"}
"""Okabe and Ito's palette, as in the other pictures: people with any colour vision can distinguish it."""
HOLDER_COLOURS = {
    "activations, kept": BLUE,
    "activations, swapped": "#CC79A7",
    "activations, recomputed": "#F0A000",
    "activations": BLUE,
    "temporaries": "#56B4E9",
    "a replay under way": ORANGE,
    "workspace of the op": "#F0E442",
    "inputs, there before": "#009E73",
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


def new_figure(height_inches: float) -> Figure:
    """An empty white figure of the common width. The first call loads matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, facecolor="white")


def write_picture(figure: Figure, path: str | Path, *, force: bool = False) -> Path:
    """Writes a figure as PNG. It only replaces a file with ``force``."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DOTS_PER_INCH)
    return write_atomic(path, data.getvalue(), force=force)


def title(figure: Figure, text: str, subtitle: str, left: float, height: float, below: float, **style: Any) -> None:
    """Draws the bold title with its baseline at a share of the height, and the subtitle with its own at ``below``."""
    figure.text(left, height, text, fontsize=12.5, fontweight="bold", color=INK)
    figure.text(left, below, subtitle, fontsize=8.5, color=QUIET, **style)


def plain_axes(axes: Axes, *sides: str, grid: Literal["x", "y"] | None = None, x: str = "", y: str = "") -> None:
    """Removes the frame except for the named sides, labels the axes, and draws grid lines for one of them."""
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color("#9A9A9A")
    axes.tick_params(colors=INK, labelsize=9)
    if grid is not None:
        axes.grid(axis=grid, color="#E6E6E6", linewidth=0.7)
        axes.set_axisbelow(True)


def legend(figure: Figure, axes: Axes, left: float, middle: float, columns: int, **style: Any) -> None:
    """Draws the labels of the axes in rows from ``left`` on, around ``middle`` of the figure's height.

    Labels of what is impossible come last.
    """
    named = zip(*axes.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(named, key=lambda pair: pair[1].startswith(("no plan", "proven"))), strict=True)
    usual: dict[str, Any] = {"loc": "center left", "columnspacing": 1.5, "handletextpad": 0.5}
    usual |= {"borderpad": 0, "borderaxespad": 0, "frameon": False, "fontsize": 8.5}
    figure.legend(handles, labels, bbox_to_anchor=(left, middle), ncols=columns, **(usual | style))


def byte_unit(size_bytes: int, least: int = 2) -> tuple[int, str]:
    """The largest unit of which an axis of that length has at least ``least``: its bytes and name."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= least << power:
            return 1 << power, unit
    return 1, "B"


def shortened(text: str, most: int) -> str:
    """The text in at most this many characters. Its end stays, because it distinguishes layers."""
    return text if len(text) <= most else f"…{text[1 - most :]}"
