"""How much larger than planned an arena comes out that the runtime lays out from a real step, and whether it is used.

    python -m benchmarks.arena_room [--workloads bert,gpt2] [--kept 0.3 0.6 0.9] -o benchmarks/results/arena-room.json

Each workload is profiled once and planned at some budgets (``kept`` as in ``arena.py``), and takes six steps under each
plan. *Quick* is what a plan's own looks give for the blocks of the step that was learned from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

import poochplan
from benchmarks.arena import WORKLOADS, fresh
from benchmarks.facts import MIB, Row, parser_of, table_head, table_row, taken, yes
from benchmarks.pairs import one_step, profiled
from benchmarks.plans import budget_of
from poochplan.formats.profile import Profile
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, Block, pack, packed

STEPS = 6
"""Two are metered by their ops, one is learned from."""


def one(name: str, profile: Profile, kept: float) -> list[Row]:
    """What was learned of the steps of one plan; none where no arena fits the budget."""
    plan = poochplan.plan(profile, budget_of(profile, kept), time_limit_s=20)
    if not plan.holds_arena:
        return []
    rows: list[Row] = []

    def learned(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Packs as the session would, and notes what a step that was learned from took."""
        every = [Block(*block) for block in blocks]
        quick = pack(every, LOOKS_PER_BLOCK * len(every))
        started_s = time.perf_counter()
        offsets, arena_bytes = packed(blocks, room_bytes)
        row = {"blocks": len(every), "room_bytes": room_bytes, "live_bytes": quick.lower_bound_bytes}
        row |= {"quick_bytes": quick.arena_bytes, "arena_bytes": arena_bytes}
        rows.append(row | {"seconds": time.perf_counter() - started_s})
        return offsets, arena_bytes

    workload = fresh(name)
    torch.manual_seed(1)
    with poochplan.apply(plan, workload.model, arena="on", pack=learned) as session:
        for _ in range(STEPS):
            one_step(workload)
        report = session.report().arena
    found = plan.prediction
    told = {
        "workload": name,
        "kept": kept,
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": found.arena_peak_bytes,
        "planned_bytes": found.arena_bytes,
        "planned_live_bytes": found.arena_live_bytes,
        "overhead": found.overhead,
        "notes": plan.notes,
        "is_used": report is not None and report.size_bytes > 0,
        "unserved": len(report.unserved) if report else 0,
    }
    return [told | row for row in rows]


def line(row: Row) -> str:
    above = (row[f"{name}_bytes"] / row["planned_bytes"] - 1 for name in ("quick", "arena", "room"))
    shares = (row["live_bytes"] / row["planned_live_bytes"] - 1, *above)
    cells = (row["workload"], f"{row['kept']:.0%}", f"{row['planned_bytes'] / MIB:.1f}")
    return table_row(*cells, *(f"{share:+.2%}" for share in shares), f"{row['seconds']:.2f}", yes(row["is_used"]))


def main() -> None:
    parser = parser_of(__doc__, workloads=",".join(WORKLOADS), kept=[0.3, 0.6, 0.9])
    asked = parser.parse_args()

    def rows_of(name: str) -> list[Row]:
        profile = profiled(fresh(name), name, iterations=3)
        return [row for kept in asked.kept for row in one(name, profile, kept)]

    print(table_head("workload", "kept", "planned MiB", "live", "quick", "learned", "room", "s", "used"))
    taken(asked, asked.workloads.split(","), rows_of, line)


if __name__ == "__main__":
    main()
