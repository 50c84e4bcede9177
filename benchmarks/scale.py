"""How planning grows with the number of saved values: repeated GPT blocks at pcie3, 50% and 10% kept.

    python -m benchmarks.scale -o benchmarks/results/scale.json            # the models: built and solved
    python -m benchmarks.scale --plan -o benchmarks/results/scale.json     # and a whole plan of each
    python -m benchmarks.scale --layers 25 110                             # other sizes: 18 values a layer and 10 more

Seconds are of one thread on whatever machine this is; ``largest_gib`` is the most memory that the process of the case
has held. A whole plan is searched for until its gap is that of ``WANTED`` or the time is over.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from itertools import product
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import Row, parser_of, table_row, taken
from benchmarks.instances import gpt_blocks
from benchmarks.plans import budget_of
from benchmarks.processes import in_a_process
from poochplan.planner import for_machine, plan
from poochplan.planner.search.bound import bound_model, bound_seconds
from poochplan.planner.search.decide import build_fluid_model
from poochplan.planner.search.fluid import FluidModel, Request
from poochplan.planner.search.solvers import SolverLimits, solve_linear
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable

LAYERS = (25, 112, 280)
"""460, 2,026 and 5,050 values."""
KEPT = (0.5, 0.1)
WANTED = {25: (0.01, 60.0), 112: (0.01, 60.0), 280: (0.02, 180.0)}
"""Layers -> gap, and seconds, for a whole plan."""
LIMIT_S = 300.0
T = TypeVar("T")


def one(layers: int, kept: float, seed: int, is_planned: bool) -> Row:
    """Builds and solves BOUND and PLAN's relaxation of one size at one budget, and plans it where asked."""
    profile = for_machine(gpt_blocks(layers, seed=seed), link="pcie3")
    budget_bytes = budget_of(profile, kept)
    problem, problem_s = timed(lambda: Problem.of(profile))
    bound, bound_s = timed(lambda: bound_model(problem, budget_bytes))
    row: Row = {"layers": layers, "values": problem.value_count, "kept": kept, "budget_bytes": budget_bytes}
    row |= {"problem_s": problem_s, "bound_build_s": bound_s} | solved("bound", bound)
    row["bound"] = bound_seconds(bound, row.pop("bound_proven")) / problem.in_core_s - 1
    model, row["plan_build_s"] = timed(
        lambda: build_fluid_model(problem, Request(budget_bytes, tuple(movable(problem))))
    )
    row |= solved("plan", model)
    del row["plan_proven"]
    if is_planned:
        gap, limit_s = WANTED.get(layers, (0.01, 60.0))
        found, row["planned_s"] = timed(lambda: plan(profile, budget_bytes, time_limit_s=limit_s, gap=gap))
        row |= {"gap": found.solve.gap, "gap_wanted": gap, "limit_s": limit_s, "overhead": found.prediction.overhead}
    row["largest_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return row


def timed(made: Callable[[], T]) -> tuple[T, float]:
    started_s = time.perf_counter()
    return made(), time.perf_counter() - started_s


def solved(name: str, model: FluidModel) -> Row:
    """Seconds of the linear program, its size, and what it proves."""
    arrays = model.linear.arrays()
    found, solve_s = timed(lambda: solve_linear(arrays, "highs", SolverLimits(LIMIT_S), relaxed=True))
    told: Row = {"solve_s": solve_s, "columns": len(arrays.cost), "entries": len(arrays.column)}
    told |= {"is_solved": found.values is not None, "proven": found.bound}
    return {f"{name}_{key}": value for key, value in told.items()}


def line(row: Row) -> str:
    whole = (f"{row['planned_s']:.0f} s", f"{row['gap']:.2%}") if "planned_s" in row else ("", "")
    seconds = [f"{row[f'{name}_s']:.1f} s" for name in ("problem", "bound_build", "bound_solve")]
    others = [f"{row[f'plan_{name}_s']:.1f} s" for name in ("build", "solve")]
    cells = (f"{row['values']:,}", f"{row['kept']:.0%}", *seconds, f"{row['bound']:.2%}", *others)
    return table_row(*cells, f"{row['largest_gib']:.2f} GiB", *whole)


def main() -> None:
    parser = parser_of(
        __doc__, layers=list(LAYERS), kept=list(KEPT), seed=0, plan=(False, "make a whole plan of each case too")
    )
    asked = parser.parse_args()
    print("| values | kept | problem | BOUND built | solved | bound | PLAN built | solved | memory | planned | gap |")
    print("|" + "---|" * 11)

    def row_of(case: tuple[int, float]) -> Row:  # in a process of its own, so that its memory is its own
        return dict(in_a_process(one, *case, asked.seed, asked.plan, start="spawn"))

    taken(asked, product(asked.layers, asked.kept), row_of, line)


if __name__ == "__main__":
    main()
