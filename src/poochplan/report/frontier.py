"""A comparison of policies: for one budget as a table, for a range of budgets as table, frame and picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.table import Table

from poochplan.formats.profile import Profile
from poochplan.planner.planning import ILP, smallest_budget
from poochplan.planner.sweep import ComparisonRow, SweepPoint, all_policies
from poochplan.planner.whatif import link_text
from poochplan.units import format_bytes, format_rate, format_seconds, share_of_peak

from . import palette
from .tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = (
    "policy", "budget_bytes", "budget_share", "feasible", "peak_bytes", "step_s", "overhead", "stall_s", "replay_s",
    "out_bytes", "in_bytes", "bound_overhead", "gap", "wall_s", "status",
)  # fmt: skip
_BYTES = ("budget_bytes", "peak_bytes", "out_bytes", "in_bytes")
# Without yellow, which is invisible on white; markers and dashes distinguish equal colours.
_COLOURS = (palette.ORANGE, palette.GREEN, palette.PINK, palette.SKY, palette.AMBER, "#7F7F7F")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))
_MARKERS = "os^Dv<>PXph"
_RIGHT = 0.72
_TICKS = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LINEAR_SHARE = 0.5
"""Length of the axis below the first tick that is not 0, in decades."""


def policy_table(rows: Iterable[ComparisonRow]) -> Table:
    """One row per policy. "ilp gains" is the overhead that the ILP's plan saves, in points."""
    headings = ("policy", "peak", "fits", "overhead", "stall", "replay", "moved", "ilp gains", "decided in")
    cells = [
        [
            row.policy,
            format_bytes(row.peak_bytes),
            "yes" if row.fits else "no",
            f"{row.overhead:+.1%}",
            format_seconds(row.stall_s),
            format_seconds(row.replay_s),
            format_bytes(row.moved_bytes),
            "-" if row.ilp_margin is None else f"{100 * row.ilp_margin:.1f}",
            format_seconds(row.wall_s),
        ]
        for row in rows
    ]
    return table("Policies, those that fit first", headings, cells)


@dataclass(frozen=True)
class Frontier:
    """A sweep, with its workload and figures of the in-core step."""

    workload: str
    subtitle: str
    in_core_peak_bytes: int
    smallest_budget_bytes: int
    points: tuple[SweepPoint, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """In the order of the sweep."""
        return tuple(dict.fromkeys(point.policy for point in self.points))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes, from small to large."""
        return tuple(sorted({point.budget_bytes for point in self.points}))

    def of(self, policy: str) -> list[SweepPoint]:
        """The policy's points, from the smallest budget to the largest."""
        return sorted((p for p in self.points if p.policy == policy), key=lambda point: point.budget_bytes)

    def at(self, budget_bytes: int) -> list[SweepPoint]:
        """The points with a plan within this budget, the least overhead first."""
        fitting = [p for p in self.points if p.budget_bytes == budget_bytes and p.overhead is not None]
        return sorted(fitting, key=lambda point: (point.overhead, point.policy != ILP))


def frontier_of(
    profile: Profile,
    points: Iterable[SweepPoint],
    smallest_budget_bytes: int | None = None,
    policies: Sequence[str] | None = None,
) -> Frontier:
    """The frontier of the points that :func:`poochplan.planner.sweep.sweep` found, which may have any order.

    By default ``smallest_budget_bytes`` is computed, and ``policies`` have the order of the points.
    """
    listed = list(points)
    order = list(policies if policies is not None else dict.fromkeys(point.policy for point in listed))
    held = profile.link.throttle_bytes_per_s
    subtitle = (
        f"in-core: peak {format_bytes(profile.in_core_peak_bytes)}, "
        f"step {format_seconds(sum(op.duration_s for op in profile.ops))} on {profile.device.name}\n"
        f"link: {link_text(profile.link)}{f', held to {format_rate(held)}' if held else ''}"
    )
    return Frontier(
        workload=profile.workload,
        subtitle=subtitle + ("; an estimate for another machine" if profile.assumed else ""),
        in_core_peak_bytes=profile.in_core_peak_bytes,
        smallest_budget_bytes=smallest_budget(profile) if smallest_budget_bytes is None else smallest_budget_bytes,
        points=tuple(sorted(listed, key=lambda point: (order.index(point.policy), point.budget_bytes))),
    )


def frontier_frame(frontier: Frontier) -> pd.DataFrame:
    """One row per point, in the sweep's order; missing figures are empty."""
    rows = [
        {"budget_share": share_of_peak(point.budget_bytes, frontier.in_core_peak_bytes)} | point.columns()
        for point in frontier.points
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_BYTES, "Int64"))


def frontier_table(frontier: Frontier) -> Table:
    """One row per budget: the ILP's overhead and bound, the best other policy, and the ILP's lead."""
    has_ilp = ILP in frontier.policies
    has_bound = any(point.bound_overhead is not None for point in frontier.points)
    rows = [_table_row(frontier, budget_bytes, has_ilp, has_bound) for budget_bytes in frontier.budgets]
    heading = f"{frontier.workload}: overhead within each budget"
    text = ("best other", "best policy", "no plan from")
    return table(heading, rows[0], [list(row.values()) for row in rows], text=text)


def _table_row(frontier: Frontier, budget_bytes: int, has_ilp: bool, has_bound: bool) -> dict[str, str]:
    fitting = frontier.at(budget_bytes)
    ilp = next((point for point in fitting if point.policy == ILP), None)
    best = next((point for point in fitting if point.policy != ILP), None)
    of_ilp, of_best = (None if point is None else point.overhead for point in (ilp, best))
    share = share_of_peak(budget_bytes, frontier.in_core_peak_bytes)
    cells = {"budget": format_bytes(budget_bytes), "of peak": f"{share:.1%}"}
    if has_ilp:
        cells["ilp"] = _overhead(of_ilp)
    if has_bound:
        cells["bound"] = _overhead(None if ilp is None else ilp.bound_overhead)
    cells["best other" if has_ilp else "best policy"] = "-" if best is None else best.policy
    cells["overhead"] = _overhead(of_best)
    if has_ilp:
        cells["ahead by"] = "-" if of_ilp is None or of_best is None else f"{100 * (of_best - of_ilp):.2f} pt"
    here = {point.policy for point in fitting}
    missing = [policy for policy in frontier.policies if policy not in here]
    return cells | {"no plan from": "any" if not here else ", ".join(missing) or "-"}


def _overhead(overhead: float | None) -> str:
    """Two decimals below a tenth, because fewer would hide small differences."""
    if overhead is None:
        return "-"
    return f"{round(overhead, 6) + 0.0:+.2%}" if abs(overhead) < 0.1 else f"{overhead:+.1%}"


def draw_frontier(frontier: Frontier) -> Figure:
    """A figure of overhead against budget, with one line per policy."""
    figure = palette.new_figure(5.6, f"{frontier.workload}: what less memory costs", frontier.subtitle)
    place = palette.placed(figure, 0.92, 0.76, right=_RIGHT)
    axes = figure.subplots(gridspec_kw=place)
    _set_axes(axes, frontier)
    _draw_impossible(axes, frontier)
    for policy in frontier.policies:
        _draw_line(axes, frontier, policy)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (_RIGHT + 0.012, place["top"])}
    palette.legend(figure, axes, 1, handlelength=3.2, labelspacing=0.75, handletextpad=0.8, **beside)
    return figure


def _set_axes(axes: Axes, frontier: Frontier) -> None:
    """Overhead on an axis that is linear near 0 and logarithmic above; budgets as bytes and as shares."""
    factor, unit = palette.byte_unit(frontier.in_core_peak_bytes, least=1)
    known = [p.overhead for p in frontier.points if p.overhead is not None]
    known += [p.bound_overhead for p in frontier.points if p.bound_overhead is not None]
    least = min((value for value in known if value > 1e-6), default=0.01)
    linear = max((tick for tick in _TICKS[1:] if tick <= least), default=_TICKS[1])
    top = max([*known, 2 * linear]) * 1.25
    axes.set_yscale("symlog", linthresh=linear, linscale=_LINEAR_SHARE)
    bottom = min(-0.08 * linear, 1.25 * min(known, default=0.0))  # a step from an arena may be shorter than in-core
    axes.set_ylim(bottom, top)
    ticks = [sign * tick for sign in (-1, 1) for tick in _TICKS if tick >= linear]
    ticks = sorted({0.0, *(tick for tick in ticks if bottom <= tick <= top)})
    axes.set_yticks(ticks, labels=[f"{tick:.3g}%" for tick in (100 * tick for tick in ticks)])
    axes.set_yticks([], minor=True)
    first, last = min(frontier.budgets[0], frontier.smallest_budget_bytes), max(frontier.budgets)
    room = max(last - first, 1) * 0.05
    axes.set_xlim((first - room) / factor, (last + room) / factor)
    shown = _apart(frontier.budgets, (last - first) * 0.085)
    axes.set_xticks(
        [size / factor for size in shown],
        labels=[f"{size / factor:.3g}\n{share_of_peak(size, frontier.in_core_peak_bytes):.0%}" for size in shown],
    )
    x = f"budget ({unit}, and share of the in-core peak)"
    palette.plain_axes(axes, "left", "bottom", grid="y", x=x, y="overhead beside the in-core step")


def _draw_impossible(axes: Axes, frontier: Frontier) -> None:
    """Shades budgets that no plan fits, and overheads that are proven impossible."""
    factor, _ = palette.byte_unit(frontier.in_core_peak_bytes, least=1)
    left, _ = axes.get_xlim()
    smallest = frontier.smallest_budget_bytes / factor
    axes.axvspan(left, smallest, facecolor="#F0F0F0", edgecolor="#B5B5B5", hatch="////", linewidth=0,
                 label=f"no plan fits (below {format_bytes(frontier.smallest_budget_bytes)})", zorder=1)  # fmt: skip
    proven = [p for p in frontier.of(ILP) if p.bound_overhead is not None]
    if proven:
        budgets = [point.budget_bytes / factor for point in proven]
        bounds = [point.bound_overhead or 0.0 for point in proven]
        # A bound holds for every smaller budget too, but for no larger one: hence steps.
        axes.fill_between(budgets, axes.get_ylim()[0], bounds, step="pre", color=palette.BLUE, alpha=0.10, linewidth=0,
                          zorder=2)  # fmt: skip
        axes.plot(budgets, bounds, drawstyle="steps-pre", color=palette.BLUE, linewidth=1.2, linestyle=palette.DASHED,
                  label="proven lower bound", zorder=3)  # fmt: skip


def _draw_line(axes: Axes, frontier: Frontier, policy: str) -> None:
    """Draws the policy's overhead. The line has gaps at budgets without a plan."""
    factor, _ = palette.byte_unit(frontier.in_core_peak_bytes, least=1)
    points = frontier.of(policy)
    found = [point for point in points if point.overhead is not None]
    label = policy
    if not found:
        label += ": finds no plan"
    elif found[0].budget_bytes > min(one.budget_bytes for one in frontier.points if one.overhead is not None):
        label += f" (from {share_of_peak(found[0].budget_bytes, frontier.in_core_peak_bytes):.0%})"
    overheads = [np.nan if point.overhead is None else point.overhead for point in points]
    axes.plot([point.budget_bytes / factor for point in points], overheads, label=label, **_style(policy))


def _style(policy: str) -> dict[str, Any]:
    if policy == ILP:
        return {"color": palette.BLUE, "linewidth": 3.0, "marker": "o", "markersize": 6, "zorder": 6}
    others = [name for name in all_policies() if name != ILP]
    place = others.index(policy) if policy in others else len(others)
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": _DASHES[place // len(_COLOURS) % len(_DASHES)],
        "linewidth": 1.4,
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4.5,
        "zorder": 4,
    }


def _apart(budgets: Sequence[int], distance: float) -> list[int]:
    """Budgets whose labels do not touch; the first and the last are among them."""
    shown = [budgets[0]]
    for size in budgets[1:-1]:
        if size - shown[-1] >= distance and budgets[-1] - size >= distance:
            shown.append(size)
    return list(dict.fromkeys([*shown, budgets[-1]]))
