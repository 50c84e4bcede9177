"""Random steps and budgets, planned and judged: by the independent checker, or by the proven bound.

    python -m benchmarks.checker -o benchmarks/results/checker.json
    python -m benchmarks.checker --bound -o benchmarks/results/bound.json

The checker (``tests/planner/checker.py``) shares no code with the planner: it carries each plan out tick by tick, with
every storage in its hands and every replay op by op: no plan is over budget, no input is missing.

``--bound``: no plan is faster than what is proven for a budget of its own peak. Each of the random steps has copies
beside which compute is slower (``tests/planner/plans.py``). A plan of random decisions at random points is
simulated, and so is what the planner's own scheduler makes of these decisions within that plan's peak; beside both
stands the linear program's bound for the plan's own peak. Of every tenth step the planner's plan for that budget, and
the integer program's bound, are held against each other too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from benchmarks.plans import budget_of, decisions_of, predicted
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.planning import plan
from poochplan.planner.search.bound import integral_bound, lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, simulate, try_decisions
from tests.planner.checker import Violation, check  # a judge of the tests, on purpose none of the package
from tests.planner.plans import interfering_profile, random_schedule
from tests.planner.random_profiles import random_profile
from tests.planner.state_profiles import random_adam, scaled

LEAST_OPS = 3
ROUNDING = 1e-9
SOLVER, LIMITS = "highs", SolverLimits(60)
EVERY = 10
WITH_STATE, STATE_SCALE = 4, 4096
"""Every fourth of the planned steps has optimizers whose state may leave, and activations about as large as chunks."""


def instance(seed: int, most_ops: int) -> tuple[Profile, int]:
    """A random step with at least one saved value, and a budget from the smallest feasible one to the in-core peak."""
    rng = random.Random(seed)
    while True:
        profile = random_profile(rng.randrange(2**32), rng.randint(LEAST_OPS, most_ops))
        if any(point.kind is PointKind.SAVE for point in profile.points):
            break
    profile = random_adam(scaled(profile, STATE_SCALE), seed) if seed % WITH_STATE == 0 else profile
    return profile, budget_of(profile, 0.0 if rng.random() < 0.2 else rng.random())


def one(seed: int, most_ops: int, time_limit_s: float) -> Row:
    profile, budget = instance(seed, most_ops)
    started_s = time.perf_counter()
    found = plan(profile, budget, threads=1, time_limit_s=time_limit_s)
    row: Row = {
        "seed": seed,
        "ops": len(profile.ops),
        "budget_bytes": budget,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "decisions": decisions_of(found),
        "streamed": sum(chunk.streamed for chunk in found.state),
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
        "plans_that_stream_state": sum(bool(row.get("streamed")) for row in rows),
        "plans_that_do_both": sum({"swap", "recompute"} <= mix for mix in mixes),
        "most_ops": max(row["ops"] for row in rows),
        "planner_wall_s": sum(row["wall_s"] for row in rows),
    }


def passed(row: Row) -> bool:
    return bool(row["within_budget"] and row["as_predicted"] and not row["violation"])


def bounds_of(seed: int) -> list[Row]:
    """The plans of one step: the seconds of each, of its bound, and of the step that keeps everything."""
    profile = interfering_profile(seed)
    problem = Problem.of(profile)
    drawn = random_schedule(problem, seed)
    at_random = Candidate("random", drawn.decisions, drawn, simulate(problem, drawn))
    scheduled = try_decisions(problem, "scheduled", drawn.decisions, at_random.peak_bytes)
    found = [
        (one.policy, one.simulation.step_s, lower_bound(problem, one.peak_bytes, SOLVER, LIMITS))
        for one in (at_random, scheduled)
    ]
    if seed % EVERY == 0:
        budget_bytes = at_random.peak_bytes
        best_s = plan(profile, budget_bytes, evaluations=500, arena="off").prediction.step_s
        found.append(("planned", best_s, integral_bound(problem, budget_bytes, LIMITS, is_whole=True)))
    kept_s = problem.keep_all_s
    return [{"seed": seed, "plan": kind, "step_s": step_s, "bound_s": bound_s, "kept_s": kept_s}
            for kind, step_s, bound_s in found]  # fmt: skip


def summary_of_bounds(rows: list[Row]) -> Row:
    """How many plans are faster than their bound, and how near the nearest come."""
    slack = [row["step_s"] / row["bound_s"] - 1 for row in rows]
    return {
        "plans": len(rows),
        "faster_than_the_bound": sum(one < -ROUNDING for one in slack),
        "seeds": sorted({row["seed"] for row, one in zip(rows, slack, strict=True) if one < -ROUNDING}),
        "bounds_above_keeping_all": sum(row["bound_s"] > row["kept_s"] * (1 + ROUNDING) for row in rows),
        "plans_at_the_bound": sum(abs(one) <= ROUNDING for one in slack),
        "median_slack": round(median(slack), 5),
    }


def judged_by_bounds(rows: list[Row], arguments: argparse.Namespace) -> int:
    kinds = dict.fromkeys(row["plan"] for row in rows)
    found = {kind: summary_of_bounds([row for row in rows if row["plan"] == kind]) for kind in kinds}
    for kind, told in found.items():
        print(kind, told)
    write_results(arguments.output, facts_of_run(arguments) | {"kinds": found})
    return int(any(told["faster_than_the_bound"] for told in found.values()))


def main() -> int:
    parser = parser_of(
        __doc__,
        count=2000,
        first=0,
        most_ops=(14, "forward ops of the largest steps, the loss not counted"),
        time_limit=2.0,
        jobs=os.cpu_count() or 1,
        bound=(False, "judge by the proven bound"),
    )
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        if arguments.bound:
            return judged_by_bounds(list(chain.from_iterable(pool.map(bounds_of, seeds, chunksize=20))), arguments)
        tried = partial(one, most_ops=arguments.most_ops, time_limit_s=arguments.time_limit)
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
