"""What the integer program PLAN proposes, beside what the search ends with: overhead in percent of the in-core step.

    python -m benchmarks.milp -o benchmarks/results/milp.json       # 6 networks on pcie4, at two budgets

Columns: the best plan of another policy, PLAN's relaxation rounded (for a budget smaller by the largest value, as the
search asks for it), the same after a descent, PLAN with its integrality after ``--limit`` seconds and a descent, a walk
of 250 evaluations per value from everything swapped, and what the rows of ``planning.json`` say the whole search found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from math import inf
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import facts_of_run, write_results
from benchmarks.planning import NETWORKS, budget_of, instance
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import EvaluatedPlan, Incumbents, Walker
from poochplan.planner.search.decide import solve_fluid
from poochplan.planner.search.fluid import Request
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.evaluator import STYLE_OF, codes_of
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import movable, swap_all

LINK = "pcie4"
KEPT = (0.5, 0.1)
POLICIES = ("greedy", "pooch")
DESCENT_S = 30.0
EVALUATIONS_PER_VALUE = 250
RESULTS = Path(__file__).parent / "results" / "planning.json"


def one(network: str, kept: float, limit_s: float, searched: dict[tuple[str, str, float], float]) -> dict[str, Any]:
    """One case."""
    profile = instance(network, LINK)
    budget_bytes = budget_of(profile, kept)
    problem = build_problem(profile)
    values = tuple(movable(problem))
    walker = Walker(values, Incumbents(problem, budget_bytes, None))
    largest = max(int(problem.rounded_bytes[value]) for value in values)

    def overhead(found: EvaluatedPlan) -> float | None:
        return found.step_s / problem.in_core_s - 1 if found.peak_bytes <= budget_bytes else None

    def proposed(budget: int, is_relaxed: bool) -> EvaluatedPlan | None:
        limits = SolverLimits(limit_s, gap=0.005, absolute_gap=5e-4 * problem.step_s)
        found = solve_fluid(problem, Request(budget, values), "highs", limits, relaxed=is_relaxed)
        return None if found.decisions is None else walker.try_styles(codes_of(found.decisions), "ilp")

    given = PolicyInput(profile, problem, budget_bytes)
    candidates = (run_policy(name, given) for name in POLICIES)
    steps = [c.simulation.step_s for c in candidates if c.peak_bytes <= budget_bytes]
    rounded, integral = proposed(budget_bytes - largest, True), proposed(budget_bytes, False)
    start = walker.try_styles(codes_of(swap_all(problem)), "swap-all", range(len(STYLE_OF)))
    walked = walker.anneal(start, Allowance(evaluations=EVALUATIONS_PER_VALUE * len(values)), temperature=0.02, seed=0)
    return {
        "network": network,
        "link": LINK,
        "kept": kept,
        "policy": min(steps, default=inf) / problem.in_core_s - 1,
        "rounded": rounded and overhead(rounded),
        "rounded_descended": rounded and overhead(walker.descend(rounded, Allowance(DESCENT_S))),
        "integral_descended": integral and overhead(walker.descend(integral, Allowance(DESCENT_S))),
        "walk": overhead(walker.descend(walked, Allowance(DESCENT_S))),
        "search": searched.get((network, LINK, kept)),
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table, as Markdown."""
    names = ("policy", "rounded", "rounded_descended", "integral_descended", "walk", "search")
    cells = ("over budget" if row[name] is None else f"{row[name]:.2%}" for name in names)
    return f"| {row['network']} | {row['kept']:.0%} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each model")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    searched = {(r["network"], r["link"], r["kept"]): r["overhead"] for r in json.loads(RESULTS.read_text())["rows"]}
    print("| network | kept | best policy | relaxation rounded | and descended | integral, descended | walk | search |")
    print("|" + "---|" * 8)
    rows = []
    for network in NETWORKS:
        for kept in KEPT:
            rows.append(one(network, kept, arguments.limit, searched))
            print(line(rows[-1]), flush=True)
    if arguments.output:
        write_results(arguments.output, {**facts_of_run(arguments), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
