"""The comparison as text: a line for each row as it comes, one Markdown table, the README's in a few columns, and who
is fastest within a budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts import MIB, table_head, table_row

from .asking import OURS
from .campaign import MATCHED, budget_bytes
from .methods import SAVE_ON_CPU
from .rows import EQUAL, Found, changes_gradients, exceeds, is_honest, meets

BEGIN, END = "<!-- compare: written by benchmarks/compare.py -->", "<!-- compare: end -->"
NAMES = {"checkpoint": "checkpointing, per block", "sac": "selective checkpointing"}
"""Of the methods at whose peak ours runs too."""


def one_line(row: Found) -> str:
    name = f"{row['network']:9} {row['method']:20} {row['at']:10}"
    return f"{name} {row['refused']}" if "refused" in row else f"{name} {_time(row, 'wall')}  {_peak(row)}  {bits(row)}"


def bits(row: Found) -> str:
    """Whether gradients are those of in-core, and what else is not."""
    if changes_gradients(row):
        kind = "gradients" if row["gradients"] != EQUAL else "parameters"
        return f"**CHANGED**: {kind} {row[kind]}"
    return EQUAL if row["buffers"] == EQUAL else f"equal; buffers {row['buffers']}"


def _time(row: Found, clock: str) -> str:
    told = row["time"][clock]
    low, high = told["interval_95"]
    return f"{told['median_ratio']:.3f} [{low:.2f}, {high:.2f}]"


def _peak(row: Found) -> str:
    share = row["peak_bytes"] / row["in_core_peak_bytes"]
    return f"{row['peak_bytes'] / MIB:.1f} ({share:.0%}){' **EXCEEDS**' if exceeds(row) else ''}"


def with_host_copies(row: Found) -> int:
    """The peak and all that a step swaps, at most: of ``save_on_cpu`` the copies are in the peak already."""
    return int(row["peak_bytes"] + (0 if row["method"] == SAVE_ON_CPU else row["out_bytes"]))


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each network, a column for each method and budget; compiled steps; what did not run."""
    rows = [row for row in found["rows"] if "refused" not in row]
    plain = {(row["network"], row["method"], row["at"]): row for row in rows if row["against"] == "in-core"}
    columns = list(dict.fromkeys((method, at) for _, method, at in plain))
    lines = [table_head("network, in-core MiB", *(f"{method}, {at}" if at else method for method, at in columns))]
    for name in dict.fromkeys(name for name, _, _ in plain):
        own = [plain.get((name, *column)) for column in columns]
        in_core = next(row["in_core_peak_bytes"] for row in own if row is not None)
        lines.append(table_row(f"{name}, {in_core / MIB:.1f}", *map(_cell, own)))
    compiled = [row for row in rows if row["against"] != "in-core"]
    others = [
        table_row(row["network"], row["method"], f"{row['peak_bytes'] / MIB:.1f}", _cell(row)) for row in compiled
    ]
    lines += ["", table_head("network", "compiled", "MiB", "by the compiled step"), *others] if compiled else []
    refused = dict.fromkeys(
        f"Not run: {row['method']} ({row['refused']})." for row in found["rows"] if "refused" in row
    )
    notes = dict.fromkeys(f"Rows with `*`: {row['note']}." for row in rows if row.get("note"))
    return "\n".join([*lines, "", *notes, *refused])


def _cell(row: Found | None) -> str:
    if row is None:
        return "-"
    peak, in_all = (one / row["in_core_peak_bytes"] for one in (row["peak_bytes"], with_host_copies(row)))
    share = f"{peak:.0%}" + (f" ({in_all:.0%})" if in_all > peak else "") + (" **EXCEEDS**" if exceeds(row) else "")
    predicted = f", predicted {row['predicted_ratio']:.2f}" if "predicted_ratio" in row else ""
    told = "" if bits(row) == EQUAL else f"; {bits(row).removeprefix(f'{EQUAL}; ')}"
    fallbacks = f"; {row['fallbacks']} fallbacks" if row["fallbacks"] else ""
    return f"{share}: {_time(row, 'wall')}{'*' if row.get('note') else ''}{predicted}{told}{fallbacks}"


def verdicts(found: dict[str, Any], shares: list[str]) -> Iterator[str]:
    """For each network and budget: ours beside the fastest other that meets it with the same gradients."""
    for network, facts in found["networks"].items():
        for share in shares:
            rows = [row for row in found["rows"] if row["network"] == network and is_honest(row)]
            ours = [row for row in rows if (row["method"], row["at"]) == (OURS, share)]
            others = [row for row in rows if not row.get("budget_bytes") and row["method"] != "kept"]
            others = [row for row in others if row["against"] == "in-core"]  # a compiled step has another in-core
            within = [row for row in others if meets(row, budget_bytes(facts, share))]
            yield f"* {network}, {share}: {_verdict(ours, within)}"
        for method in MATCHED:
            yield from _matched([row for row in found["rows"] if row["network"] == network and "time" in row], method)


def _matched(rows: list[Found], method: str) -> Iterator[str]:
    """Ours at another method's peak, beside that method."""
    theirs = [row for row in rows if (row["method"], row["at"]) == (method, "")]
    for row in [row for row in rows if theirs and (row["method"], row["at"]) == (OURS, method)]:
        both = f"ours {_time(row, 'wall')}; {method} {_time(theirs[0], 'wall')}"
        yield f"* {row['network']}, at the peak of {method}: {both}."


def _verdict(ours: list[Found], others: list[Found]) -> str:
    own = f"ours {_time(ours[0], 'wall')}" if ours else "ours has no row"
    if not others:
        return f"{own}; no other method meets it with the gradients of in-core."
    best = min(others, key=lambda row: float(row["time"]["wall"]["median_ratio"]))
    return f"{own}; fastest other {best['method']} {_time(best, 'wall')}."


def short_table(found: dict[str, Any], share: str) -> str:
    """Markdown, a line a network: step times by its own in-core, medians; ``share``: the budget of the last column."""
    head = ["network, in-core peak"]
    head += [cell for method in MATCHED for cell in (NAMES[method], "**ours** at that peak")]
    head += [f"`{SAVE_ON_CPU.replace('-', '_')}`", f"**ours** at {share}, with its file"]
    names = list(dict.fromkeys(row["network"] for row in found["rows"]))
    return "\n".join([table_head(*head), *(table_row(*_short_cells(found, name, share)) for name in names)])


def _short_cells(found: dict[str, Any], network: str, share: str) -> list[str]:
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


def put_into_page(page: Path, text: str) -> None:
    """Writes the table between the page's two marks.

    Raises
    ------
    ValueError
        The page lacks the marks.
    """
    old = page.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"{page}: expected the lines {BEGIN!r} and {END!r}, found them not; add them to the page")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text.rstrip()}\n{END}{after}", encoding="utf-8")
