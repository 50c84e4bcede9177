"""A fit as text and picture: its ladder as table, frame and picture, and its result in a few lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
from rich.table import Table

from poochplan.fitting.fit import Fit
from poochplan.fitting.probes import Rung
from poochplan.units import format_bytes, format_seconds

from . import palette
from .tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fit_frame(fit: Fit) -> pd.DataFrame:
    """One row per rung, from small to large, and one for the next value; bytes, seconds, shares, items per second."""
    frame = pd.DataFrame([asdict(rung) for rung in _all_rungs(fit)])
    return frame.rename(columns={"items_per_s": f"{fit.unit}_per_s", "value": fit.parameter})


def fit_data(fit: Fit) -> dict[str, Any]:
    """The data of ``pooch fit --json``: the value, the ladder, and the run."""
    names = (
        "workload", "parameter", "unit", "memory_bytes", "margin_bytes", "budget_bytes", "most_overhead", "value",
        "in_core_value", "times_in_core", "best", "following", "rungs", "trial", "notes",
    )  # fmt: skip
    of_plan = {"inputs": fit.plan.inputs, "assumed": fit.plan.assumed}
    data = {name: getattr(fit, name) for name in names} | of_plan | {"parameters": fit.assumed}
    return dict(msgspec.to_builtins(data))


def assumed_text(fit: Fit) -> str:
    """The workload's sizes that the answer is for, to follow its name; empty if it has no parameter of sizes."""
    sizes = ", ".join(f"{name} {value}" for name, value in fit.assumed.items())
    return f" with {sizes}" if sizes else ""


def fit_table(fit: Fit) -> Table:
    within = f"{format_bytes(fit.budget_bytes)} of {format_bytes(fit.memory_bytes)}"
    heading = f"{fit.workload}{assumed_text(fit)}: {fit.parameter} within {within}"
    headings = [fit.parameter, "in-core peak", "smallest peak", "overhead", "proven bound", "step", f"{fit.unit}/s", ""]
    return table(heading, headings, [_cells(fit, rung) for rung in _all_rungs(fit)], text=("",))


def _all_rungs(fit: Fit) -> list[Rung]:
    return [*fit.rungs, *filter(None, [fit.following])]


def _cells(fit: Fit, rung: Rung) -> list[str]:
    cells = [str(rung.value), format_bytes(rung.in_core_peak_bytes), format_bytes(rung.smallest_peak_bytes)]
    cells += ["-" if x is None else f"{x:+.1%}" for x in (rung.overhead, rung.bound_overhead)]
    cells.append("-" if rung.step_s is None else format_seconds(rung.step_s))
    cells.append("-" if rung.items_per_s is None else f"{rung.items_per_s:.4g}")
    marks = {"largest in-core": rung.value == fit.in_core_value, "largest": rung.value == fit.value,
             "best throughput": rung.value == fit.best, "does not fit": not rung.fits}  # fmt: skip
    return [*cells, ", ".join(text for text, holds in marks.items() if holds)]


def fit_lines(fit: Fit) -> list[str]:
    """The result in words: the value, the memory of the next one, the best throughput, and the run."""
    name, budget = fit.parameter, format_bytes(fit.budget_bytes)
    after = fit.following
    largest = "the largest tried" if after is None else "the largest"
    lines = [f"{name} {fit.value} is {largest} that trains within {budget}{_compared(fit)}"]
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
    if fit.in_core_value == fit.value:
        return ", with everything kept"
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


def draw_fit(fit: Fit) -> Figure:
    """A figure: at the top in-core and smallest possible peaks against the memory, below throughput and overhead."""
    headline = f"{fit.workload}: {fit.parameter} within {format_bytes(fit.budget_bytes)}"
    in_core = "none in-core" if fit.in_core_value is None else f"largest in-core {fit.in_core_value}"
    best = "" if fit.best is None else f"; best throughput at {fit.best}"
    sizes = f"{assumed_text(fit).strip()}\n" if fit.assumed else ""
    found = f"{sizes}largest {fit.value}, {in_core}{best}; {fit.profile.device.name}, link {fit.profile.link.name}"
    figure = palette.new_figure(6.4, headline, found)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw=palette.placed(figure, 0.93, 0.54, hspace=0.16))
    frame, rate = fit_frame(fit).set_index(fit.parameter), f"{fit.unit}_per_s"
    factor, unit = palette.byte_unit(frame["in_core_peak_bytes"].max())
    upper.plot(frame["in_core_peak_bytes"] / factor, color=palette.ORANGE, marker="s", label="everything kept")
    upper.plot(frame["smallest_peak_bytes"] / factor, color=palette.BLUE, marker="o", label="smallest possible peak")
    palette.level(upper, "memory", fit.budget_bytes, factor, linestyle=palette.DASHED)
    upper.set_ylim(bottom=0)
    planned = frame.head(len(fit.rungs)).dropna(subset=[rate])
    lower.plot(planned[rate], color=palette.PURPLE, marker="o", label=f"{fit.unit} per second under the plan")
    above: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8}
    for value, row in planned.iterrows():
        lower.annotate(f"{row['overhead']:+.1%}", (value, row[rate]), color=palette.QUIET, **above)
    lower.set_ylim(0, 1.25 * planned[rate].max())
    for axes, x, y in ((upper, "", f"peak ({unit})"), (lower, fit.parameter, f"{fit.unit}/s, and overhead")):
        palette.plain_axes(axes, "left", "bottom", grid="y", x=x, y=y)
        axes.legend(frameon=False, fontsize=8.5)
    return figure
