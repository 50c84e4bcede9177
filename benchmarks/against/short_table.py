"""The comparison in a few columns, for the README: at each method's peak, its step and ours."""

from __future__ import annotations

from typing import Any

from benchmarks.facts import MIB, table_head, table_row

from .asking import OURS
from .campaign import MATCHED
from .compare_table import with_host_copies
from .methods import SAVE_ON_CPU
from .rows import Found

NAMES = {"checkpoint": "checkpointing, per block", "sac": "selective checkpointing"}


def short_table(found: dict[str, Any], share: str) -> str:
    """Markdown, a line a network: step times by its own in-core, medians; ``share``: the budget of the last column."""
    head = ["network, in-core peak"]
    head += [cell for method in MATCHED for cell in (NAMES[method], "**ours** at that peak")]
    head += [f"`{SAVE_ON_CPU.replace('-', '_')}`", f"**ours** at {share}, with its file"]
    names = list(dict.fromkeys(row["network"] for row in found["rows"]))
    return "\n".join([table_head(*head), *(table_row(*_cells(found, name, share)) for name in names)])


def _cells(found: dict[str, Any], network: str, share: str) -> list[str]:
    rows = {(row["method"], row["at"]): row for row in found["rows"] if row["network"] == network}
    first = next(row for row in rows.values() if "in_core_peak_bytes" in row)
    cells = [f"{network}, {first['in_core_peak_bytes'] / MIB:.0f} MiB"]
    for method in MATCHED:
        cells += [_step(rows.get((method, "")), with_peak=True), _step(rows.get((OURS, method)), is_bold=True)]
    own = rows.get((OURS, share))
    saved = rows.get((SAVE_ON_CPU, ""))
    return [*cells, _step(saved, with_peak=True), _step(own, with_peak=True, with_file=True, is_bold=True)]


def _step(row: Found | None, *, with_peak: bool = False, with_file: bool = False, is_bold: bool = False) -> str:
    if row is None or "time" not in row:
        return "-"
    step = f"{row['time']['wall']['median_ratio']:.2f}"
    step = f"**{step}**" if is_bold else step
    in_all = f", {with_host_copies(row) / row['in_core_peak_bytes']:.0%}" if with_file else ""
    return f"{row['peak_bytes'] / row['in_core_peak_bytes']:.0%}{in_all}: {step}" if with_peak else step
