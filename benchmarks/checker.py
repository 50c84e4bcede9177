"""Random steps and budgets, planned and handed to the independent checker: no plan over budget, no input missing.

    python -m benchmarks.checker -o benchmarks/results/checker.json

The checker (``tests/planner/checker.py``) shares no code with the planner: it carries each plan out tick by tick, with
every storage in its hands and every replay op by op.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from benchmarks.plans import budget_of, decisions_of, predicted
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.planning import plan
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
    return profile, budget_of(profile, 0.0 if rng.random() < 0.2 else rng.random())


def one(seed: int, most_ops: int, time_limit_s: float) -> Row:
    """Plans one instance and has the plan checked."""
    profile, budget = instance(seed, most_ops)
    started_s = time.perf_counter()
    found = plan(profile, budget, threads=1, time_limit_s=time_limit_s)
    row: Row = {
        "seed": seed,
        "ops": len(profile.ops),
        "budget_bytes": budget,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "decisions": decisions_of(found),
        "wall_s": time.perf_counter() - started_s,
        "violation": "",
    }
    try:
        verdict = check(profile, found)
    except Violation as violation:
        return {**row, "violation": str(violation) or "unnamed", "within_budget": None, "as_predicted": None}
    most = max(verdict.peak_bytes, verdict.first_step_peak_bytes)
    said = predicted(found, "peak_bytes", "first_step_peak_bytes", "out_bytes", "in_bytes")
    is_so = all(getattr(verdict, name) == size_bytes for name, size_bytes in said.items())
    return {**row, "peak_bytes": most, "within_budget": most <= budget, "as_predicted": is_so}


def summary(rows: list[Row]) -> Row:
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


def passed(row: Row) -> bool:
    return bool(row["within_budget"] and row["as_predicted"] and not row["violation"])


def main() -> int:
    parser = parser_of(
        __doc__,
        count=2000,
        first=0,
        most_ops=(14, "forward ops of the largest steps, the loss not counted"),
        time_limit=2.0,
        jobs=os.cpu_count() or 1,
    )
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    tried = partial(one, most_ops=arguments.most_ops, time_limit_s=arguments.time_limit)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(tried, seeds, chunksize=4))
    found = summary(rows)
    failed = [row for row in rows if not passed(row)]
    for row in failed:
        print(json.dumps(row))
    write_results(arguments.output, {**facts_of_run(arguments), "summary": found, "failed": failed})
    print(json.dumps(found, indent=1))
    print(f"{len(rows) - len(failed)} of {len(rows)} plans within budget, carried out, and as predicted")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
