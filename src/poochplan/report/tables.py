"""Tables for the terminal: a summary of two columns, and one row per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.table import Table

from poochplan.formats.display.profile_summary import in_core_step_text
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.plan import Plan, Prediction
from poochplan.formats.profile import Memory, Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.units import format_bytes, format_rate, format_seconds, format_with_spread, share_of_peak

from .layer_table import decision_totals

if TYPE_CHECKING:
    from poochplan.planner.arena.step_layout import Laid

Rows = Mapping[str, str]
TELLING = 0.02
"""Share of a phase below which what its ops were short of, or over, is not shown."""
_FORMATS = {"bytes": format_bytes, "s": format_seconds}


def summary_table(title: str, rows: Rows) -> Table:
    """A title over rows of a name and a value."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def frame_table(title: str, frame: pd.DataFrame, headings: Mapping[str, str], *, fold: bool = False) -> Table:
    """The frame with its index as first column; ``headings`` are the columns to show, in order.

    Columns whose name ends in ``_bytes`` or ``_s`` are written with their unit; so are decisions' bytes. Text
    stays as it is, and where it is long takes several lines if ``fold``.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column(str(frame.index.name or ""), overflow="fold")
    for heading in headings.values():
        table.add_column(heading, justify="left" if fold else "right", no_wrap=not fold, overflow="fold")
    for index, row in frame.iterrows():
        table.add_row(str(index), *(_cell(column, row[column]) for column in headings))
    return table


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows for JSON, index included; what is not a finite number becomes None."""
    rows = frame.reset_index().to_dict("records")
    return [
        {str(name): None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        for row in rows
    ]


def _cell(column: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == 0:
        return "-"
    if not math.isfinite(value):
        return "n/a"
    unit = column.rpartition("_")[2]
    if column in ("keep", "swap", "recompute"):
        unit = "bytes"
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def profile_rows(profile: Profile) -> Rows:
    """What ``pooch profile`` says first."""
    times, link = profile.times, profile.link
    saved = [value for value in profile.values if value.kind == "activation"]
    movable = [value for value in saved if not value.pinned]
    throttle = f", held to {format_rate(link.throttle_bytes_per_s)}" if link.throttle_bytes_per_s else ""
    static = ", ".join(f"{name} {format_bytes(size)}" for name, size in static_bytes(profile).items())
    return {
        "device": f"{profile.device.name} ({profile.device.kind}, {format_bytes(profile.device.memory_bytes)})",
        "mode": profile.mode,
        "in-core step": f"{in_core_step_text(times)}, {times.iterations} iterations",
        "forward / backward / optimizer": " / ".join(
            format_with_spread(seconds, spread_s)
            for seconds, spread_s in (
                (times.forward_s, times.forward_spread_s),
                (times.backward_s, times.backward_spread_s),
                (times.optimizer_s, times.optimizer_spread_s),
            )
        ),
        **{f"{phase} ops": text for phase, text in profile.reconciliation(TELLING).items()},
        "in-core peak": f"{_in_core_text(profile)}, in {profile.in_core_peak_layer or OUTSIDE}",
        "live all step long": static or "nothing",
        "saved for backward": f"{format_bytes(sum(value.size_bytes for value in saved))} in {len(saved)} values, "
        f"{format_bytes(sum(value.size_bytes for value in movable))} of it free to swap or recompute",
        "ops / values / points": f"{len(profile.ops)} / {len(profile.values)} / {len(profile.points)}",
        f"link ({link.name})": f"out {format_rate(link.outward.bandwidth_bytes_per_s)}, "
        f"in {format_rate(link.inward.bandwidth_bytes_per_s)}{throttle}",
        **{f"advice {number}": line for number, line in enumerate(profile.advice(), 1)},
    } | _numbered(profile.assumed, profile.notes)


def plan_rows(plan: Plan) -> Rows:
    """What ``pooch plan`` says first: the prediction, and how it was found."""
    prediction, solve = plan.prediction, plan.solve
    share = share_of_peak(plan.budget_bytes, prediction.in_core_peak_bytes)
    totals = decision_totals(plan)
    found = f"by {solve.policy}; bound by {solve.solver}; {solve.status} after {format_seconds(solve.wall_s)}"
    if solve.solver == "none":
        found = f"{solve.policy}, without a solver, in {format_seconds(solve.wall_s)}"
    bound = {}
    if solve.bound_s is not None and solve.gap is not None:
        least = overhead_text(solve.bound_s / prediction.in_core_step_s - 1) if prediction.in_core_step_s > 0 else "-"
        bound = {"no plan is better than": f"{least} (gap {solve.gap:.2%} of the step)"}
    return {
        "budget": f"{format_bytes(plan.budget_bytes)} ({share:.0%} of the in-core peak, "
        f"{format_bytes(prediction.in_core_peak_bytes)})",
        "budget is on": counted_text(plan),
        "predicted peak": peak_text(prediction),
        **arena_row(plan),
        "predicted step": f"{format_seconds(prediction.step_s)} ({prediction.in_core_text})",
        "predicted overhead": overhead_text(prediction.overhead),
        **bound,
        **_beside_kept(prediction),
        "of that": f"stall {format_seconds(prediction.stall_s)}, replay {format_seconds(prediction.replay_s)}, "
        f"interference {format_seconds(prediction.interference_s)}{runtime_text(prediction)}",
        "bytes swapped": swapped_text(prediction.out_bytes, prediction.in_bytes),
        "decisions": ", ".join(
            f"{decision} {int(row['values'])} ({format_bytes(row['size_bytes'])})"
            for decision, row in totals.iterrows()
        ),
        "found": found,
    } | _numbered(plan.assumed, plan.notes)


def runtime_text(prediction: Prediction) -> str:
    """What the runtime itself takes of the step, where that is known."""
    return f", the runtime itself {format_seconds(prediction.runtime_s)}" if prediction.runtime_s else ""


def counted_text(plan: Plan) -> str:
    """Which bytes the budget is on."""
    if plan.holds_arena:
        return "one arena for the step, and what lies outside it"
    if plan.prediction.memory is Memory.ALLOCATED:
        return "allocated bytes: tensors, and what ops take and give back inside"
    return "live bytes of tensors"


def peak_text(prediction: Prediction) -> str:
    """The predicted peak: of allocated bytes and of live ones, where both are known."""
    peak = format_bytes(max(prediction.peak_bytes, prediction.first_step_peak_bytes))
    if prediction.memory is Memory.LIVE or prediction.live_peak_bytes is None:
        return peak
    return f"{peak} allocated, {format_bytes(prediction.live_peak_bytes)} live"


def arena_row(plan: Plan) -> Rows:
    """The arena of the step; why there is none, where it takes the compiled allocator; else empty."""
    found = plan.prediction
    if not found.arena_bytes or not found.arena_live_bytes:
        return {}
    above = found.arena_bytes / found.arena_live_bytes - 1
    text = f"{format_bytes(found.arena_bytes)} for all that the step makes, {above:.1%} above its live peak"
    if found.arena_peak_bytes is not None:
        text = f"{text}; {format_bytes(found.arena_peak_bytes)} with what lies outside"
    if plan.device == "cpu" and not plan.holds_arena:
        text = f"{text}, ABOVE THE BUDGET: steps are served from it with pooch run --arena on alone"
    rows = {"arena": text}
    if plan.device == "cpu" and found.memory is Memory.LIVE and not plan.estimate:
        rows["no allocator"] = (
            "the profile does not know what ops take inside; install g++ or clang++ where there is none "
            "(pooch doctor says), and profile again"
        )
    return rows


def kept_row(plan: Plan, kept: Laid | None) -> Rows:
    """The step that keeps everything, from an arena: what that takes, and the budget to ask for. Empty without one."""
    if kept is None:
        return {}
    from poochplan.planner.planning import share_that_holds

    in_core_bytes = plan.prediction.in_core_peak_bytes
    share = share_that_holds(max(kept.peak_bytes, in_core_bytes), in_core_bytes).replace(".00%", "%")
    size = format_bytes(kept.layout.arena_bytes)
    if kept.peak_bytes <= plan.budget_bytes:
        return {"everything kept": f"the same step from one arena of {size}"}
    return {"everything kept": f"--budget {share}: the same step from one arena of {size}"}


def _in_core_text(profile: Profile) -> str:
    peak, live_bytes = format_bytes(profile.in_core_peak_bytes), profile.in_core_live_peak_bytes
    if profile.memory is Memory.LIVE or live_bytes is None:
        return peak
    return f"{peak} allocated, {format_bytes(live_bytes)} live"


def _numbered(assumed: tuple[str, ...], notes: tuple[str, ...]) -> dict[str, str]:
    """Rows for what was assumed instead of measured, and for the notes."""
    return {f"assumed {number}": text for number, text in enumerate(assumed, 1)} | {
        f"note {number}": note for number, note in enumerate(notes, 1)
    }


def _beside_kept(prediction: Prediction) -> Rows:
    """The planned step beside one of the same session that keeps everything; empty in plans that do not say."""
    kept_s = prediction.kept_step_s
    if not kept_s:
        return {}
    told = f"{overhead_text(prediction.step_s / kept_s - 1)} of {format_seconds(kept_s)}"
    return {"beside keeping all": f"{told}, the same session's step that keeps everything"}


def overhead_text(overhead: float) -> str:
    """Such as ``"+4.2%"``."""
    return f"{overhead:+.1%}"


def swapped_text(out_bytes: int, in_bytes: int) -> str:
    """Such as ``"12.0 MiB out, 12.0 MiB in"``."""
    return f"{format_bytes(out_bytes)} out, {format_bytes(in_bytes)} in"
