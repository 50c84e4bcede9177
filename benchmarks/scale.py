"""How planning grows with the number of saved values: repeated GPT blocks at pcie3, 50% and 10% kept.

    python -m benchmarks.scale -o benchmarks/results/scale.json            # the models: built and solved
    python -m benchmarks.scale --plan -o benchmarks/results/scale.json     # and a whole plan of each
    python -m benchmarks.scale --layers 25 110                             # other sizes: 18 values a layer and 10 more

Seconds are of one thread on whatever machine this is; ``largest_gib`` is the most memory that the process of the case
has held. A whole plan is searched for until its gap is that of ``WANTED`` or the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import facts_of_run, write_results
from benchmarks.instances import gpt_blocks
from benchmarks.planning import budget_of
from poochplan.formats.profile import Profile
from poochplan.planner import for_machine, plan
from poochplan.planner.search.bound import bound_model, bound_seconds
from poochplan.planner.search.decide import build_fluid_model
from poochplan.planner.search.fluid import FluidModel, Request
from poochplan.planner.search.solvers import SolverLimits, solve_linear
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import movable

LAYERS = (25, 112, 280)
"""460, 2,026 and 5,050 values."""
KEPT = (0.5, 0.1)
WANTED = {25: (0.01, 60.0), 112: (0.01, 60.0), 280: (0.02, 180.0)}
"""Layers -> gap, and seconds, for a whole plan."""
LIMIT_S = 300.0


def one(layers: int, kept: float, seed: int, is_planned: bool) -> dict[str, Any]:
    """Builds and solves BOUND and PLAN's relaxation of one size at one budget, and plans it where asked."""
    profile = for_machine(gpt_blocks(layers, seed=seed), link="pcie3")
    budget_bytes = budget_of(profile, kept)
    started_s = time.perf_counter()
    problem = build_problem(profile)
    row: dict[str, Any] = {"layers": layers, "values": problem.value_count, "kept": kept, "budget_bytes": budget_bytes}
    row["problem_s"] = time.perf_counter() - started_s
    started_s = time.perf_counter()
    bound = bound_model(problem, budget_bytes)
    row["bound_build_s"] = time.perf_counter() - started_s
    row |= {f"bound_{name}": figure for name, figure in solved(bound).items()}
    found_s = bound_seconds(bound, row.pop("bound_proven"))
    row["bound"] = found_s / problem.in_core_s - 1
    started_s = time.perf_counter()
    model = build_fluid_model(problem, Request(budget_bytes, tuple(movable(problem))))
    row["plan_build_s"] = time.perf_counter() - started_s
    row |= {f"plan_{name}": figure for name, figure in solved(model).items() if name != "proven"}
    if is_planned:
        row |= planned(profile, budget_bytes, *WANTED.get(layers, (0.01, 60.0)))
    row["largest_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return row


def solved(model: FluidModel) -> dict[str, Any]:
    """Seconds of the linear program, its size, and what it proves."""
    arrays = model.linear.arrays()
    started_s = time.perf_counter()
    found = solve_linear(arrays, "highs", SolverLimits(LIMIT_S), relaxed=True)
    return {
        "solve_s": time.perf_counter() - started_s,
        "columns": len(arrays.cost),
        "entries": len(arrays.column),
        "is_solved": found.values is not None,
        "proven": found.bound,
    }


def planned(profile: Profile, budget_bytes: int, gap: float, limit_s: float) -> dict[str, Any]:
    """A whole plan, as a user asks for it."""
    started_s = time.perf_counter()
    found = plan(profile, budget_bytes, time_limit_s=limit_s, gap=gap)
    return {
        "planned_s": time.perf_counter() - started_s,
        "gap": found.solve.gap,
        "gap_wanted": gap,
        "limit_s": limit_s,
        "overhead": found.prediction.overhead,
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table, as Markdown."""
    whole = f"{row['planned_s']:.0f} s | {row['gap']:.2%}" if "planned_s" in row else " | "
    seconds = [f"{row[name]:.1f} s" for name in ("problem_s", "bound_build_s", "bound_solve_s")]
    others = [f"{row[name]:.1f} s" for name in ("plan_build_s", "plan_solve_s")]
    cells = (f"{row['values']:,}", f"{row['kept']:.0%}", *seconds, f"{row['bound']:.2%}", *others)
    return f"| {' | '.join(cells)} | {row['largest_gib']:.2f} GiB | {whole} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--kept", type=float, nargs="+", default=list(KEPT))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="store_true", help="make a whole plan of each case too")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    print("| values | kept | problem | BOUND built | solved | bound | PLAN built | solved | memory | planned | gap |")
    print("|" + "---|" * 11)
    rows = []
    for layers in arguments.layers:
        for kept in arguments.kept:  # a process of its own each, so that its memory is its own
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows.append(pool.submit(one, layers, kept, arguments.seed, arguments.plan).result())
            print(line(rows[-1]), flush=True)
            write_results(arguments.output, {**facts_of_run(arguments), "rows": rows})
    print(json.dumps({"cases": len(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
