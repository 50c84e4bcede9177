"""A fit for reading: the ladder as a table and a frame, and what was found in a few lines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from poochplan.fitting.fit import Fit
from poochplan.fitting.ladder import Rung
from poochplan.formats.files import write_atomic
from poochplan.report.tables import overhead_text
from poochplan.units import format_bytes, format_seconds


def fit_frame(fit: Fit) -> pd.DataFrame:
    """One row per rung, from small to large, and the value after it; bytes, seconds, shares, items per second."""
    rungs = [*fit.rungs, *([fit.following] if fit.following is not None else [])]
    frame = pd.DataFrame([asdict(rung) for rung in rungs])
    return frame.rename(columns={"items_per_s": f"{fit.unit}_per_s", "value": fit.parameter})


def write_fit(fit: Fit, path: str | Path, *, force: bool = False) -> Path:
    """Writes the frame as CSV, never over a file unless ``force``."""
    return write_atomic(path, fit_frame(fit).to_csv(index=False).encode(), force=force)


def fit_data(fit: Fit) -> dict[str, Any]:
    """What ``pooch fit --json`` prints: the value, the ladder, and what was run."""
    named = ("workload", "parameter", "unit", "memory_bytes", "margin_bytes", "most_overhead", "value", "in_core_value")
    return {
        **{name: getattr(fit, name) for name in named},
        "parameters": dict(fit.assumed),
        "inputs": list(fit.plan.inputs),
        "budget_bytes": fit.budget_bytes,
        "times_in_core": fit.times_in_core,
        "best": fit.best,
        "following": None if fit.following is None else asdict(fit.following),
        "rungs": [asdict(rung) for rung in fit.rungs],
        "trial": None if fit.trial is None else asdict(fit.trial),
        "assumed": list(fit.plan.assumed),
        "notes": list(fit.notes),
    }


def assumed_text(fit: Fit) -> str:
    """The sizes that the answer is for, behind the workload's name; empty where it has no parameter of sizes."""
    sizes = ", ".join(f"{name} {value}" for name, value in fit.assumed.items())
    return f" with {sizes}" if sizes else ""


def fit_table(fit: Fit) -> Table:
    """One row per rung."""
    within = f"{format_bytes(fit.budget_bytes)} of {format_bytes(fit.memory_bytes)}"
    title = f"{fit.workload}{assumed_text(fit)}: {fit.parameter} within {within}"
    table = Table(title=title, title_justify="left", title_style="bold",
                  box=None, pad_edge=False, header_style="dim")  # fmt: skip
    headings = ("in-core peak", "smallest peak", "overhead", "proven bound", "step", f"{fit.unit}/s")
    table.add_column(fit.parameter, justify="right", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for rung in (*fit.rungs, *([fit.following] if fit.following is not None else [])):
        table.add_row(*_cells(fit, rung))
    return table


def _cells(fit: Fit, rung: Rung) -> list[str]:
    cells = [str(rung.value), format_bytes(rung.in_core_peak_bytes), format_bytes(rung.smallest_peak_bytes)]
    cells += ["-" if x is None else overhead_text(x) for x in (rung.overhead, rung.bound_overhead)]
    cells.append("-" if rung.step_s is None else format_seconds(rung.step_s))
    cells.append("-" if rung.items_per_s is None else f"{rung.items_per_s:.4g}")
    return [*cells, ", ".join(_marks(fit, rung))]


def _marks(fit: Fit, rung: Rung) -> list[str]:
    marks = {"largest in-core": rung.value == fit.in_core_value, "largest": rung.value == fit.value,
             "best throughput": rung.value == fit.best, "does not fit": not rung.fits}  # fmt: skip
    return [text for text, holds in marks.items() if holds]


def fit_lines(fit: Fit) -> list[str]:
    """What was found, in words: the value, what the next one takes, the best throughput, and the run."""
    name, budget = fit.parameter, format_bytes(fit.budget_bytes)
    lines = [f"{name} {fit.value} is the largest that trains within {budget}{_compared(fit)}"]
    after = fit.following
    if after is not None and after.smallest_peak_bytes > fit.budget_bytes:
        lines.append(
            f"{name} {after.value} needs {format_bytes(after.smallest_peak_bytes)} at one moment, "
            f"{after.smallest_peak_bytes - fit.budget_bytes} bytes too many, whatever is swapped or recomputed"
        )
    elif after is not None and fit.most_overhead is not None:
        lines.append(f"no plan of {name} {after.value} was found at an overhead of at most {fit.most_overhead:.1%}")
    if fit.best is not None and fit.best != fit.value:
        lines.append(f"throughput is best at {name} {fit.best}, not at the largest")
    if fit.trial is not None:
        lines.append(_run_line(fit))
    return [*lines, *fit.notes]


def _compared(fit: Fit) -> str:
    if fit.in_core_value is None:
        return "; none does with everything kept"
    return f", {fit.times_in_core:.3g} times the largest in-core one, {fit.in_core_value}"


def _run_line(fit: Fit) -> str:
    trial = fit.trial
    assert trial is not None
    peak = "without a metered peak" if trial.peak_bytes is None else f"within {format_bytes(trial.peak_bytes)}"
    if not trial.is_within:
        peak = f"ABOVE THE BUDGET at {format_bytes(trial.peak_bytes or 0)}"
    bits = {True: ", bitwise equal to in-core", None: "; in-core does not fit this machine, so not compared"}
    same = bits.get(trial.is_bitwise, f", NOT BITWISE EQUAL: {trial.difference}")
    return f"{trial.steps} steps of {fit.parameter} {trial.value} were run: {peak}{same}"
