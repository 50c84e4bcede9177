"""The comparison of policies as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from poochplan.planner.sweep import ComparisonRow
from poochplan.units import format_bytes, format_seconds

from .tables import overhead_text

_COLUMNS = ("peak", "fits", "overhead", "stall", "replay", "moved", "ilp gains", "decided in")


def policy_table(title: str, rows: Iterable[ComparisonRow]) -> Table:
    """One row per policy; "ilp gains" is by how many points of overhead the ILP's plan is faster."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("policy", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            format_bytes(row.peak_bytes),
            "yes" if row.fits else "no",
            overhead_text(row.overhead),
            format_seconds(row.stall_s),
            format_seconds(row.replay_s),
            format_bytes(row.moved_bytes),
            "-" if row.ilp_margin is None else f"{100 * row.ilp_margin:.1f}",
            format_seconds(row.wall_s),
        )
    return table
