"""Tables for the terminal: rows of a name and a value, data frames, and figures of two files side by side."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd
from rich.table import Table

from poochplan.units import format_bytes, format_rate, format_seconds

Unit = Literal["", "bytes", "s", "share", "bytes/s"]
_FORMATS = {"bytes": format_bytes, "s": format_seconds, "share": "{:+.2%}".format, "bytes/s": format_rate}


def table(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()) -> Table:
    """Rows of cells under headings. Numbers stand at the right on one line; the first column and those of ``text`` at
    the left, where long cells take several lines.
    """
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for place, heading in enumerate(headings):
        is_text = heading in text
        justify: Literal["left", "right"] = "left" if is_text or place == 0 else "right"
        made.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def summary_table(title: str, rows: Mapping[str, str]) -> Table:
    """A title over rows of a name and a value."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows.items():
        made.add_row(*row)
    return made


def frame_table(title: str, frame: pd.DataFrame, headings: Mapping[str, str], *, fold: bool = False) -> Table:
    """The frame with its index as first column; ``headings`` are the columns to show, in order.

    Columns whose name ends in ``_bytes`` or ``_s`` are written with their unit; so are decisions' bytes. Text
    stays as it is, and where it is long takes several lines if ``fold``.
    """
    index = str(frame.index.name or "")
    rows = [[str(name), *(_cell(column, row[column]) for column in headings)] for name, row in frame.iterrows()]
    folded = [index, *(headings.values() if fold else ())]
    return table(title, [index, *headings.values()], rows, text=folded)


def _cell(column: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == 0:
        return "-"
    if not math.isfinite(value):
        return "n/a"
    unit = "bytes" if column in ("keep", "swap", "recompute") else column.rpartition("_")[2]
    if unit in ("bytes", "s"):
        return _FORMATS[unit](value)
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows for JSON, index included; what is not a finite number becomes None."""
    rows = frame.reset_index().to_dict("records")
    return [
        {str(name): None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        for row in rows
    ]


class Figure(NamedTuple):
    """One figure of each of two files; text, or a number in ``unit``. None where a file does not say."""

    name: str
    first: str | int | float | None
    second: str | int | float | None
    unit: Unit = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Its name, both figures in words, and the relative change of a number that is no share itself."""
        first, second = self.first, self.second
        change = ""
        if isinstance(first, int | float) and isinstance(second, int | float) and first and self.unit != "share":
            change = f"{second / first - 1:+.1%}"
        return self.name, self._text(first), self._text(second), change

    def _text(self, value: str | int | float | None) -> str:
        if value is None:
            return "-"
        return str(value) if isinstance(value, str) or not self.unit else _FORMATS[self.unit](value)


def figure_table(title: str, figures: Iterable[Figure], names: tuple[str, str]) -> Table:
    """One row per figure; ``names`` are those of the two files."""
    return table(title, ["", *names, "change"], [figure.cells for figure in figures], text=names)


def figure_data(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """The figures for JSON; numbers in bytes, seconds and shares."""
    return [figure._asdict() for figure in figures]
