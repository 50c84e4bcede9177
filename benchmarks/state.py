"""Optimizer state and activations under one budget: the joint plan, and ways to decide about one of the two alone.

    pooch profile hf:llama --set batch_size=2 --set length=4096 --set precision=bfloat16 --mode fake --roofline h100 \\
        -o llama.profile.json
    python -m benchmarks.state --profile llama.profile.json -o benchmarks/results/state.json
    python -m benchmarks.state --table benchmarks/results/state.json

Nothing is run. Each way gives the overhead of its step as simulated, and the chunks that it streams:

* joint: ``plan``;
* activations: ``plan`` without state;
* state: all activations are kept, and as few chunks as fit are streamed;
* all state: all activations are kept, and all chunks are streamed;
* greedy, state first: as few chunks as fit, or all, then the policy greedy for activations;
* greedy, activations first: as few chunks as any plan needs, then the same;
* on demand: everything is away, each activation is copied at its use, and each chunk before and behind its step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import Row, parser_of, rows_in, table_head, table_row, taken
from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.search.streaming import Streaming
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import Candidate, simulated, swap_all_on_demand

GIB = 1 << 30
WAYS = ("joint", "activations", "state", "all state", "greedy, state first", "greedy, activations first", "on demand")
OPTIONS = {
    "profile": ("", "the step to plan"),
    "gib": ([70.0, 56.0, 48.0, 40.0, 32.0], "budgets in GiB"),
    "time_limit": (20.0, "seconds of each search"),
    "table": ("", "print the table of this results file"),
}


def rows_of(profile: Profile, budget_bytes: int, time_limit_s: float) -> list[Row]:
    steps = Streaming(Problem.of(profile))
    same: Row = {"budget_bytes": budget_bytes, "chunks": steps.most}
    return [same | {"way": way} | row_of(way, steps, budget_bytes, time_limit_s) for way in WAYS]


def row_of(way: str, steps: Streaming, budget_bytes: int, time_limit_s: float) -> Row:
    started_s = time.perf_counter()
    if way in ("joint", "activations"):
        found = planned(steps.problem.profile, budget_bytes, time_limit_s, without=[] if way == "joint" else ["state"])
    else:
        found = decided(way, steps, budget_bytes)
    return found | {"wall_s": time.perf_counter() - started_s}


def planned(profile: Profile, budget_bytes: int, time_limit_s: float, without: list[str]) -> Row:
    try:
        made = plan(profile, budget_bytes, time_limit_s=time_limit_s, without=without)
    except InfeasibleError as refused:
        return {"smallest_bytes": refused.smallest_budget_bytes}
    streamed = sum(chunk.streamed for chunk in made.state)
    return {"overhead": made.prediction.overhead, "gap": made.solve.gap, "streamed": streamed}


def decided(way: str, steps: Streaming, budget_bytes: int) -> Row:
    """Of a way without a search."""
    kept, least = steps.fewest_kept(budget_bytes), steps.fewest(budget_bytes)
    if way == "on demand":
        step = steps.step(steps.most)
        chosen, count, extra_s = swap_all_on_demand(step), steps.most, exposed_s(steps) - steps.added_s(steps.most)
    elif way in ("state", "all state"):
        count, extra_s = steps.most if kept is None or way == "all state" else kept, 0.0
        chosen = simulated(steps.step(count), way, keep_all(steps.step(count)))
    else:
        first = steps.most if kept is None else kept
        count, extra_s = first if way == "greedy, state first" else least or 0, 0.0
        chosen = greedy(steps.step(count), budget_bytes)
    if chosen.peak_bytes > budget_bytes:
        return {"smallest_bytes": chosen.peak_bytes}
    return {"overhead": steps.problem.overhead(chosen.simulation.step_s + extra_s), "streamed": count}


def greedy(step: Problem, budget_bytes: int) -> Candidate:
    return run_policy("greedy", PolicyInput(step, budget_bytes))


def exposed_s(steps: Streaming) -> float:
    """Seconds of all chunks' copies, one after the other and with no op beside them."""
    link, sizes = steps.problem.link, [chunk.size_bytes for chunk in steps.chunks]
    return sum(link.in_seconds(size_bytes) + link.out_seconds(size_bytes) for size_bytes in sizes)


def table(rows: list[Row]) -> str:
    lines = [table_head("budget", *WAYS)]
    for budget_bytes in dict.fromkeys(row["budget_bytes"] for row in rows):
        found = {row["way"]: row for row in rows if row["budget_bytes"] == budget_bytes}
        lines.append(table_row(f"{budget_bytes / GIB:.0f} GiB", *(cell(found[way]) for way in WAYS)))
    return "\n".join(lines)


def cell(row: Row) -> str:
    if "overhead" not in row:
        return f"needs {row['smallest_bytes'] / GIB:.1f} GiB"
    gap = f", gap {row['gap']:.1%}" if row.get("gap") is not None else ""
    return f"{row['overhead']:+.1%} ({row['streamed']} of {row['chunks']}{gap})"


def shown(row: Row) -> str:
    return f"{row['budget_bytes'] / GIB:.0f} GiB, {row['way']}: {cell(row)}, {row['wall_s']:.0f} s"


def main(arguments: argparse.Namespace) -> int:
    if arguments.table:
        print(table(rows_in(arguments.table)))
        return 0
    profile = Profile.load(arguments.profile)
    rows = taken(
        arguments,
        arguments.gib,
        lambda gib: rows_of(profile, int(gib * GIB), arguments.time_limit),
        shown,
        in_core_peak_bytes=profile.in_core_peak_bytes,
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(parser_of(__doc__, "python -m benchmarks.state", **OPTIONS).parse_args()))
