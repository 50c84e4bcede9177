"""How much larger than planned an arena comes out that the runtime lays out from a real step, and whether it is used.

    python -m benchmarks.arena_room [--workloads bert,gpt2] [--kept 0.3 0.6 0.9] -o benchmarks/results/arena-room.json

Each workload is profiled once and planned at some budgets (``kept`` as in ``arena.py``), and takes six steps under each
plan. *Quick* is what a plan's own looks give for the blocks of the step that was learned from.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import poochplan
from benchmarks.arena import WORKLOADS, fresh
from benchmarks.facts import facts_of_run, write_results
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, Block, pack, packed
from poochplan.sessions import PLANNER

STEPS = 6
"""Two are metered by their ops, one is learned from."""


@dataclass
class Learned:
    """State: what each step that was learned from took."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        every = [Block(*block) for block in blocks]
        quick = pack(every, LOOKS_PER_BLOCK * len(every))
        started_s = time.perf_counter()
        offsets, arena_bytes = packed(blocks, room_bytes)
        self.rows.append(
            {
                "blocks": len(every),
                "room_bytes": room_bytes,
                "live_bytes": quick.lower_bound_bytes,
                "quick_bytes": quick.arena_bytes,
                "arena_bytes": arena_bytes,
                "seconds": time.perf_counter() - started_s,
            }
        )
        return offsets, arena_bytes


def one(name: str, profile: Profile, kept: float) -> list[dict[str, Any]]:
    """What was learned of the steps of one plan; none where no arena fits the budget."""
    smallest, most = poochplan.smallest_budget(profile), profile.in_core_peak_bytes
    plan = poochplan.plan(profile, int(smallest + kept * max(0, most - smallest)), time_limit_s=20)
    if not plan.holds_arena:
        return []
    learned, workload = Learned(), fresh(name)
    assert workload.optimizer is not None
    torch.manual_seed(1)
    with poochplan.apply(plan, workload.model, arena="on", planner=PLANNER._replace(pack=learned)) as session:
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            workload.step().backward()  # type: ignore[no-untyped-call]
            workload.optimizer.step()
        report = session.report().arena
    served = {
        "is_used": report is not None and report.size_bytes > 0,
        "unserved": len(report.unserved) if report else 0,
    }
    return [{"workload": name, "kept": kept, **planned(plan), **row, **served} for row in learned.rows]


def planned(plan: Plan) -> dict[str, Any]:
    found = plan.prediction
    return {
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": found.arena_peak_bytes,
        "planned_bytes": found.arena_bytes,
        "planned_live_bytes": found.arena_live_bytes,
        "overhead": found.overhead,
        "notes": plan.notes,
    }


def line(row: dict[str, Any]) -> str:
    above = {name: row[f"{name}_bytes"] / row["planned_bytes"] - 1 for name in ("quick", "arena", "room")}
    cells = [row["workload"], f"{row['kept']:.0%}", f"{row['planned_bytes'] / 2**20:.1f}"]
    cells += [
        f"{row['live_bytes'] / row['planned_live_bytes'] - 1:+.2%}",
        *(f"{share:+.2%}" for share in above.values()),
    ]
    cells += [f"{row['seconds']:.2f}", "yes" if row["is_used"] else "no"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--kept", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| workload | kept | planned MiB | live | quick | learned | room | s | used |\n" + "|---" * 9 + "|")
    for name in arguments.workloads.split(","):
        workload = fresh(name)
        profile = poochplan.profile(
            workload.step, model=workload.model, optimizer=workload.optimizer, workload=name, iterations=3
        )
        for kept in arguments.kept:
            found = one(name, profile, kept)
            print("\n".join(map(line, found)), flush=True)
            rows += found
            write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})


if __name__ == "__main__":
    main()
