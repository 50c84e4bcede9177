"""The frontier of memory against overhead: as a frame and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table

from poochplan.formats.files import write_atomic
from poochplan.formats.profile import Profile
from poochplan.planner.planning import ILP, smallest_budget
from poochplan.planner.sweep import SweepPoint
from poochplan.planner.whatif import link_text
from poochplan.units import format_bytes, format_rate, format_seconds, share_of_peak

from .tables import overhead_text

COLUMNS = (
    "policy", "budget_bytes", "budget_share", "feasible", "peak_bytes", "step_s", "overhead", "stall_s", "replay_s",
    "out_bytes", "in_bytes", "bound_overhead", "gap", "wall_s", "status",
)  # fmt: skip
_BYTES = ("budget_bytes", "peak_bytes", "out_bytes", "in_bytes")


@dataclass(frozen=True)
class Frontier:
    """A sweep and what it is of."""

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
    """What :func:`poochplan.planner.sweep.sweep` found, in any order, with what it is of.

    ``smallest_budget_bytes`` is worked out where it is not given. The order of ``policies`` is that of the points where
    none is given.
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
    """One row per point, in the sweep's order; what there is no figure for is empty."""
    rows = [
        {"budget_share": share_of_peak(point.budget_bytes, frontier.in_core_peak_bytes)} | point.columns()
        for point in frontier.points
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_BYTES, "Int64"))


def write_frontier(frontier: Frontier, path: str | Path, *, force: bool = False) -> Path:
    """Writes the frame as CSV, never over a file unless ``force``."""
    return write_atomic(path, frontier_frame(frontier).to_csv(index=False).encode(), force=force)


def frontier_table(frontier: Frontier) -> Table:
    """One row per budget: the ILP's overhead and bound, the best other policy, and by how much the ILP is ahead."""
    table = Table(title=f"{frontier.workload}: overhead within each budget", title_justify="left", title_style="bold",
                  box=None, pad_edge=False, header_style="dim")  # fmt: skip
    has_ilp = ILP in frontier.policies
    has_bound = any(point.bound_overhead is not None for point in frontier.points)
    headings = ["of in-core", *(["ilp"] if has_ilp else []), *(["proven bound"] if has_bound else [])]
    headings += ["best other" if has_ilp else "best policy", "overhead", *(["ilp ahead by"] if has_ilp else [])]
    table.add_column("budget", no_wrap=True)
    for heading in [*headings, "no plan from"]:
        is_text = heading in ("best other", "best policy", "no plan from")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "no plan from")
    for budget_bytes in frontier.budgets:
        table.add_row(*_table_row(frontier, budget_bytes, has_ilp, has_bound))
    return table


def _table_row(frontier: Frontier, budget_bytes: int, has_ilp: bool, has_bound: bool) -> list[str]:
    fitting = frontier.at(budget_bytes)
    ilp = next((point for point in fitting if point.policy == ILP), None)
    best = next((point for point in fitting if point.policy != ILP), None)
    of_ilp, of_best = (None if point is None else point.overhead for point in (ilp, best))
    cells = [format_bytes(budget_bytes), f"{share_of_peak(budget_bytes, frontier.in_core_peak_bytes):.1%}"]
    if has_ilp:
        cells.append(_overhead(of_ilp))
    if has_bound:
        cells.append(_overhead(None if ilp is None else ilp.bound_overhead))
    cells += ["-" if best is None else best.policy, _overhead(of_best)]
    if has_ilp:
        cells.append("-" if of_ilp is None or of_best is None else f"{100 * (of_best - of_ilp):.2f} points")
    here = {point.policy for point in fitting}
    missing = [policy for policy in frontier.policies if policy not in here]
    return [*cells, "any" if not here else ", ".join(missing) or "-"]


def _overhead(overhead: float | None) -> str:
    """Two decimals below a tenth, where fewer would hide that there is a difference."""
    if overhead is None:
        return "-"
    return f"{round(overhead, 6) + 0.0:+.2%}" if abs(overhead) < 0.1 else overhead_text(overhead)
