"""The planner against exhaustive search, on tiny random steps: how often its plan is the best there is.

    python -m benchmarks.oracle -o benchmarks/results/oracle.json

Three kinds of instance, each a random step with a random budget between the smallest feasible one and the in-core peak:

* ``full``: up to 5 movable values against every schedule (``tests/planner/oracle.py``). No plan may be faster, and a
  proven bound may not be above the optimum.
* ``decisions``: 5 to 10 movable values against all decisions, each as the planner's own scheduler carries it out. The
  planner may be faster here, where it tries more schedules of a decision than one.
* ``sources``: as ``full``, of steps with sources of saved values.

Seeds are those of ``tests/planner/tiny_profiles.py``; one instance repeats with ``--kind full --first SEED --count 1``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.facts import facts_of_run, parser_of, table_row, write_results
from poochplan.formats.plan import Decision
from poochplan.planner.planning import plan
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, try_decisions
from tests.planner.oracle import best_decisions, best_schedule  # the yardstick, none of the package
from tests.planner.oracle_search import Freedom
from tests.planner.tiny_profiles import tiny_instance, tiny_with_sources

VALUES = {"full": (2, 5), "decisions": (5, 10)}
SOURCES = "sources"
KINDS = *VALUES, SOURCES
EQUAL = 1e-6
"""Relative difference of the simulated step below which two plans are equal."""
ROUNDING = 1e-9
WORST = 20
FREEDOMS = {
    "early replay": Freedom(early_replay=False),
    "order outwards": Freedom(out_order=False),
    "choice of releases": Freedom(release_choice=False),
    "order inwards": Freedom(prefetch_order=False),
    "leaving after a replay": Freedom(leave_late=False),
}
"""What the best schedules do, and the search without it."""


def one(kind: str, seed: int, time_limit_s: float) -> dict[str, Any]:
    """The planner and the oracle on one instance."""
    if kind == SOURCES:
        profile, problem, budget = tiny_with_sources(seed)
    else:
        profile, problem, budget = tiny_instance(seed, *VALUES[kind])
    started_s = time.perf_counter()
    found = plan(profile, budget, threads=1, time_limit_s=time_limit_s)
    planned_s = time.perf_counter()
    plan_s = found.prediction.step_s
    reasons: list[str] = []
    if kind != "decisions":
        optimum = best_schedule(problem, budget, at_most_s=plan_s)
        best_s = optimum.step_s if optimum is not None else None
        if optimum is not None and plan_s > optimum.step_s * (1 + EQUAL):
            reasons = why(problem, budget, optimum.schedule.decisions, optimum.step_s)
    else:
        best_s = best_decisions(problem, budget).simulation.step_s
    bound_s = found.solve.bound_s
    return {
        "kind": kind,
        "seed": seed,
        "movable": len(movable(problem)),
        "budget_bytes": budget,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_step_s": problem.step_s,
        "plan_step_s": plan_s,
        "best_step_s": best_s,
        "lost": None if best_s is None else plan_s / best_s - 1,
        "why": reasons,
        "bound_s": bound_s,
        "bound_holds": None if bound_s is None or best_s is None else bound_s <= best_s * (1 + ROUNDING),
        "planner_wall_s": planned_s - started_s,
        "oracle_wall_s": time.perf_counter() - planned_s,
    }


def why(problem: Problem, budget: int, decisions: tuple[Decision, ...], best_s: float) -> list[str]:
    """What the planner would have needed: each thing without which the best step is out of reach."""
    own = try_decisions(problem, "best decisions", decisions, budget)
    if own.peak_bytes <= budget and own.simulation.step_s <= best_s * (1 + EQUAL):
        return ["other decisions"]
    reasons = []
    for name, freedom in FREEDOMS.items():
        found = best_schedule(problem, budget, freedom=freedom, at_most_s=best_s * (1 + EQUAL))
        if found is None:
            reasons.append(name)
    return reasons or ["no single one"]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and worst cases of one kind; ``better`` counts plans that the oracle did not reach."""
    lost = [row["lost"] for row in rows if row["lost"] is not None]
    bounds = [row for row in rows if row["bound_holds"] is not None]
    worst = sorted((row for row in rows if row["lost"] is not None), key=lambda row: -row["lost"])
    return {
        "instances": len(rows),
        "equal": sum(abs(one) < EQUAL for one in lost),
        "better": sum(row["lost"] is None or row["lost"] < -EQUAL for row in rows),
        "within_1_percent": sum(one <= 0.01 for one in lost),
        "within_2_percent": sum(one <= 0.02 for one in lost),
        "mean_lost": statistics.fmean(lost) if lost else None,
        "worst_lost": max(lost, default=None),
        "worst_seeds": [[row["seed"], row["lost"]] for row in worst[:WORST] if row["lost"] > EQUAL],
        "why": dict(Counter(" + ".join(row["why"]) for row in rows if row["why"])),
        "bounds": len(bounds),
        "bounds_above_the_best": sum(not row["bound_holds"] for row in bounds),
        "seeds_of_bounds_above_the_best": [row["seed"] for row in bounds if not row["bound_holds"]],
        "bound_to_best_mean": statistics.fmean(row["bound_s"] / row["best_step_s"] for row in bounds)
        if bounds
        else None,
        "planner_wall_s": sum(row["planner_wall_s"] for row in rows),
        "oracle_wall_s": sum(row["oracle_wall_s"] for row in rows),
    }


def is_notable(row: dict[str, Any]) -> bool:
    """Whether the plan is not equal to the best, or the bound fails."""
    return row["lost"] is None or abs(row["lost"]) >= EQUAL or row["bound_holds"] is False


def line(kind: str, found: dict[str, Any]) -> str:
    """One line of the Markdown table in README.md."""
    count = found["instances"]
    shares = (f"{found[name] / count:.1%}" for name in ("equal", "within_1_percent", "within_2_percent"))
    bounds = f"{found['bounds_above_the_best']} of {found['bounds']}" if found["bounds"] else "none proven"
    worst = "-" if found["worst_lost"] is None else f"{found['worst_lost']:.2%}"
    return table_row(kind, count, *shares, worst, found["better"], bounds)


def main() -> int:
    parser = parser_of(
        __doc__,
        count=(500, "instances of each kind"),
        first=(0, "first seed"),
        time_limit=(10.0, "seconds for the solver, per plan"),
        jobs=(os.cpu_count() or 1, "processes"),
    )
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    arguments = parser.parse_args()
    results: dict[str, Any] = {**facts_of_run(arguments), "summary": {}, "rows": []}
    heads = ("kind", "instances", "equal", "within 1%", "within 2%", "worst", "better than the oracle")
    print(table_row(*heads, "bounds above the best"), f"|{'---|' * (len(heads) + 1)}", sep="\n")
    failed = 0
    for kind in KINDS if arguments.kind == "all" else (arguments.kind,):
        seeds = range(arguments.first, arguments.first + arguments.count)
        with ProcessPoolExecutor(arguments.jobs) as pool:
            count = len(seeds)
            rows = list(pool.map(one, [kind] * count, seeds, [arguments.time_limit] * count, chunksize=4))
        found = results["summary"][kind] = summary(rows)
        results["rows"] += [row for row in rows if is_notable(row)]
        print(line(kind, found), flush=True)
        failed += found["bounds_above_the_best"] + (found["better"] if kind != "decisions" else 0)
    write_results(arguments.output, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
