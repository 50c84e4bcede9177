"""The proven bound against plans that no planner made: none is faster than what is proven for a budget of its own peak.

    python -m benchmarks.bound --steps 2000 -o benchmarks/results/bound.json

Each of the random steps has copies beside which compute is slower (``tests/planner/random_schedules.py``). A plan of
random decisions at random points is simulated, and so is what the planner's own scheduler makes of these decisions
within that plan's peak; beside both stands the linear program's bound for the plan's own peak. Of every tenth step the
planner's plan for that budget, and the integer program's bound, are held against each other too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import facts_of_run, write_results
from poochplan.planner.planning import plan
from poochplan.planner.search.bound import integral_bound, lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import Candidate, simulate, try_decisions
from tests.planner.random_schedules import interfering_profile, random_schedule

ROUNDING = 1e-9
SOLVER, LIMITS = "highs", SolverLimits(60)
EVERY = 10


def one(seed: int) -> list[dict[str, Any]]:
    """The plans of one step: the seconds of each, of its bound, and of the step that keeps everything."""
    profile = interfering_profile(seed)
    problem = build_problem(profile)
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
        found.append(("planned", best_s, integral_bound(problem, budget_bytes, SOLVER, LIMITS, is_whole=True)))
    kept_s = problem.keep_all_s
    return [{"seed": seed, "plan": kind, "step_s": step_s, "bound_s": bound_s, "kept_s": kept_s}
            for kind, step_s, bound_s in found]  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many plans are faster than their bound, and how near the nearest come."""
    slack = [row["step_s"] / row["bound_s"] - 1 for row in rows]
    return {
        "plans": len(rows),
        "faster_than_the_bound": sum(one < -ROUNDING for one in slack),
        "seeds": sorted({row["seed"] for row, one in zip(rows, slack, strict=True) if one < -ROUNDING}),
        "bounds_above_keeping_all": sum(row["bound_s"] > row["kept_s"] * (1 + ROUNDING) for row in rows),
        "plans_at_the_bound": sum(abs(one) <= ROUNDING for one in slack),
        "median_slack": round(statistics.median(slack), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = [row for found in pool.map(one, range(options.steps), chunksize=20) for row in found]
    kinds = dict.fromkeys(row["plan"] for row in rows)
    found = {kind: summary([row for row in rows if row["plan"] == kind]) for kind in kinds}
    for kind, told in found.items():
        print(kind, told)
    write_results(options.output, facts_of_run(options) | {"kinds": found})
    return int(any(told["faster_than_the_bound"] for told in found.values()))


if __name__ == "__main__":
    sys.exit(main())
