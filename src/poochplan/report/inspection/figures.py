"""Figures of two files beside each other: only those that differ are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from rich.table import Table

from poochplan.units import format_bytes, format_rate, format_seconds

Unit = Literal["", "bytes", "s", "share", "bytes/s"]
_TEXT = {
    "bytes": format_bytes,
    "s": format_seconds,
    "share": lambda share: f"{share:+.2%}",
    "bytes/s": format_rate,
}


class Figure(NamedTuple):
    """One figure of each file; text, or a number in ``unit``. None where a file does not say."""

    name: str
    first: str | int | float | None
    second: str | int | float | None
    unit: Unit = ""

    @property
    def change(self) -> str:
        """By how much the second is more or less than the first; empty for text."""
        first, second = self.first, self.second
        if isinstance(first, str) or isinstance(second, str) or first is None or second is None or self.unit == "share":
            return ""
        return f"{second / first - 1:+.1%}" if first else ""


def those_that_differ(figures: Iterable[Figure]) -> list[Figure]:
    """In their order."""
    return [figure for figure in figures if figure.first != figure.second]


def figure_table(title: str, figures: Iterable[Figure], names: tuple[str, str]) -> Table:
    """One row per figure; ``names`` are those of the two files."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_column("change", justify="right", no_wrap=True)
    for figure in figures:
        texts = (_text(figure.first, figure.unit), _text(figure.second, figure.unit))
        table.add_row(figure.name, *texts, figure.change)
    return table


def figure_data(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """For JSON; numbers in bytes, seconds and shares."""
    return [{"name": one.name, "first": one.first, "second": one.second, "unit": one.unit} for one in figures]


def _text(value: str | int | float | None, unit: Unit) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) or not unit:
        return str(value)
    return _TEXT[unit](value)
