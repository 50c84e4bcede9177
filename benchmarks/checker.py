"""Random steps and budgets, planned and handed to the independent checker: no plan over budget, no input missing.

    python -m benchmarks.checker -o benchmarks/results/checker.json

The checker (``tests/planner/checker.py``) shares no code with the planner: it carries each plan out tick by tick, with
every storage in its hands and every replay op by op.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import facts_of_run, write_results
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.planning import plan, smallest_budget
from tests.planner.checker import Violation, check  # a judge of the tests, on purpose none of the package
from tests.planner.random_profiles import random_profile

LEAST_OPS = 3


def instance(seed: int, most_ops: int) -> tuple[Profile, int]:
    """A random step with at least one saved value, and a budget from the smallest feasible one to the in-core peak."""
    rng = random.Random(seed)
    while True:
        profile = random_profile(rng.randrange(2**32), rng.randint(LEAST_OPS, most_ops))
        if any(point.kind is PointKind.SAVE for point in profile.points):
            break
    smallest = smallest_budget(profile)
    share = 0.0 if rng.random() < 0.2 else rng.random()
    return profile, int(smallest + share * (profile.in_core_peak_bytes - smallest))


def one(seed: int, most_ops: int, time_limit_s: float) -> dict[str, Any]:
    """Plans one instance and has the plan checked."""
    profile, budget = instance(seed, most_ops)
    started_s = time.perf_counter()
    found = plan(profile, budget, threads=1, time_limit_s=time_limit_s)
    wall_s = time.perf_counter() - started_s
    decisions = [str(value.decision) for value in found.values]
    row: dict[str, Any] = {
        "seed": seed,
        "ops": len(profile.ops),
        "budget_bytes": budget,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "decisions": {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")},
        "wall_s": wall_s,
        "violation": "",
    }
    try:
        verdict = check(profile, found)
    except Violation as violation:
        return {**row, "violation": str(violation) or "unnamed", "within_budget": None, "as_predicted": None}
    predicted = found.prediction
    bytes_seen = (verdict.peak_bytes, verdict.first_step_peak_bytes, verdict.out_bytes, verdict.in_bytes)
    said = (predicted.peak_bytes, predicted.first_step_peak_bytes, predicted.out_bytes, predicted.in_bytes)
    return {
        **row,
        "peak_bytes": max(verdict.peak_bytes, verdict.first_step_peak_bytes),
        "within_budget": max(verdict.peak_bytes, verdict.first_step_peak_bytes) <= budget,
        "as_predicted": bytes_seen == said,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all plans, and the seeds of those that failed."""
    mixes = [{kind for kind, count in row["decisions"].items() if count} for row in rows]
    return {
        "plans": len(rows),
        "over_budget": sum(row["within_budget"] is False for row in rows),
        "violations": sum(bool(row["violation"]) for row in rows),
        "not_as_predicted": sum(row["as_predicted"] is False for row in rows),
        "failed_seeds": [row["seed"] for row in rows if not passed(row)],
        "plans_that_swap": sum("swap" in mix for mix in mixes),
        "plans_that_recompute": sum("recompute" in mix for mix in mixes),
        "plans_that_do_both": sum({"swap", "recompute"} <= mix for mix in mixes),
        "most_ops": max(row["ops"] for row in rows),
        "planner_wall_s": sum(row["wall_s"] for row in rows),
    }


def passed(row: dict[str, Any]) -> bool:
    return bool(row["within_budget"] and row["as_predicted"] and not row["violation"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--most-ops", type=int, default=14, help="forward ops of the largest steps, the loss not counted"
    )
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds for the solver, per plan")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("-o", "--output", default=None, help="write the summary and what failed as JSON here")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = list(
            pool.map(one, seeds, [arguments.most_ops] * len(seeds), [arguments.time_limit] * len(seeds), chunksize=4)
        )
    found = summary(rows)
    failed = [row for row in rows if not passed(row)]
    for row in failed:
        print(json.dumps(row))
    if arguments.output:
        results = {**facts_of_run(arguments), "summary": found, "failed": failed}
        write_results(arguments.output, results)
    print(json.dumps(found, indent=1))
    print(f"{len(rows) - len(failed)} of {len(rows)} plans within budget, carried out, and as predicted")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
