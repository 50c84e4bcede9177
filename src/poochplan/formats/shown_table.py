"""Small tables as HTML and as plain text, without any package for either."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""Each as long as the headings; the first cell names the row."""
_LEFT = ' style="text-align: left; vertical-align: top"'


def html_table(title: str, rows: Rows, headings: Sequence[str] = ()) -> str:
    """A table with its title above, for ``_repr_html_``; every text is escaped."""
    head = "".join(f"<th{_LEFT}>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th{_LEFT}>{escape(name)}</th>{''.join(f'<td{_LEFT}>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><caption{_LEFT}>{escape(title)}</caption>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def text_table(title: str, rows: Rows, headings: Sequence[str] = ()) -> str:
    """The same in lines, each column as wide as its longest cell; no spaces at the ends of lines."""
    listed = [tuple(headings), *rows] if headings else list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed)
    return "\n".join([title, *lines])


def numbered(name: str, texts: Sequence[str]) -> dict[str, str]:
    """A row for each text: ``note 1``, ``note 2``, and so on."""
    return {f"{name} {number}": text for number, text in enumerate(texts, 1)}
