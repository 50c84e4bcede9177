"""Plans of the instances: overhead, proven bound and gap at five budgets on four links, and every other policy beside.

    python -m benchmarks.planning grid -o benchmarks/results/planning.json       # 6 networks x 4 links x 5 budgets
    python -m benchmarks.planning grid --networks llama-7b qwen2-7b vit-l whisper-large -o ...  # on an H100 and pcie5
    python -m benchmarks.planning wall -o benchmarks/results/planning-wall.json  # time to a wanted gap, one at a time
    python -m benchmarks.planning seeds -o benchmarks/results/planning-seeds.json  # the ten hardest, five seeds each
    python -m benchmarks.planning table benchmarks/results/planning.json         # that of benchmarks/pages/costs.md
    python -m benchmarks.planning caps [--networks llama-7b ...]                 # PoocH's caps, raised
    python -m benchmarks.planning uses                                           # how far apart backward uses a value
    python -m benchmarks.planning ranks -o benchmarks/results/planning-ranks.json  # eight on a host, together and alone
    python -m benchmarks.planning milp --time-limit 20 -o ...                    # what the integer program is worth
    python -m benchmarks.planning measured --profiles demo.json gpt2.json        # as measured on a machine, with arenas

``kept`` x means: of the bytes between the smallest feasible budget and the in-core peak, the budget has x. A link goes
with the device it is found at: pcie3 and nvlink2 with the V100, pcie4 with the A100, pcie5 with the H200.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import Row, facts_of_run, parser_of, rows_in, table_head, table_row, write_results
from benchmarks.plans import budget_of, costs_of, policy_overhead, stored
from poochplan import Profile
from poochplan.formats.profile import PointKind
from poochplan.peak import simulate_plan
from poochplan.planner import for_machine, plan
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.policies import pooch as pooch_policy
from poochplan.planner.policies.swapping import level_at, level_distances
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import EvaluatedPlan, Incumbents, Walker
from poochplan.planner.search.decide import solve_fluid
from poochplan.planner.search.fluid import Request
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.evaluator import STYLE_OF, codes_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, swap_all

RESULTS = Path(__file__).resolve().parent / "results" / "planning.json"
HARDEST, SEEDS = 10, 5
RANKS = 8
RAISED = ((300, 200, 1000), (600, 200, 2000), (1200, 200, 4000), (600, 10**6, 4000), (20_000, 10**6, 100_000))
NETWORKS = ("resnet50-b256", "resnext101-3d", "unet3d-192", "gpt2-medium", "seq2seq", "bert-large")
OF_TODAY = ("llama-7b", "qwen2-7b", "vit-l", "whisper-large")
TRANSFORMERS = ("gpt2-medium", "bert-large", "gpt-96", *OF_TODAY)
LINKS = {"pcie3": "v100", "pcie4": "a100", "pcie5": "h200", "nvlink2": "v100"}
SHARES = ("60%", "70%", "80%")
KEPT = (0.7, 0.5, 0.3, 0.2, 0.1)
WANTED_GAP, WANTED_OF_TRANSFORMERS = 0.005, 0.01
MILP_LINK, MILP_KEPT = "pcie4", (0.5, 0.1)
DESCENT_S = 30.0
EVALUATIONS_PER_VALUE = 250
Told = Iterator[tuple[Row, str]]
"""Rows, and the line that is printed of each."""
WALL_CASES = (
    ("resnet50-b256", 0.005, 10.0),
    ("unet3d-192", 0.005, 10.0),
    ("gpt2-medium", 0.02, 60.0),
    ("gpt-96", 0.04, 300.0),
)


def instance(network: str, link: str) -> Profile:
    device = "h200" if network == "gpt-96" else "h100" if network in OF_TODAY else LINKS[link]
    return for_machine(stored(f"{network}-{device}"), link=link)


def wanted_gap(network: str) -> float:
    return WANTED_OF_TRANSFORMERS if network in TRANSFORMERS else WANTED_GAP


def one(network: str, link: str, kept: float, time_limit_s: float, gap: float, policies: tuple[str, ...]) -> Row:
    """Plans one case, and asks ``policies`` for their plans."""
    profile = instance(network, link)
    budget_bytes = budget_of(profile, kept)
    started_s = time.perf_counter()
    found = plan(profile, budget_bytes, time_limit_s=time_limit_s, gap=gap)
    row: Row = costs_of(found) | {"wall_s": time.perf_counter() - started_s}
    in_core_s, objective_s = found.prediction.in_core_step_s, found.solve.objective_s
    given = PolicyInput(Problem.of(profile), budget_bytes)
    overheads = {name: policy_overhead(name, given) for name in policies}
    others = [overhead for overhead in overheads.values() if overhead is not None]
    return row | {
        "network": network,
        "link": link,
        "kept": kept,
        "values": len(found.values),
        "budget_bytes": budget_bytes,
        "peak_bytes": found.prediction.peak_bytes,
        "gap_wanted": wanted_gap(network),
        "fluid": None if objective_s is None else objective_s / in_core_s,
        "status": found.solve.status,
        "policies": overheads,
        "margin": min(others) - row["overhead"] if others else None,
        "is_worse": any(other < row["overhead"] for other in others),
    }


def cases_of(names: list[str]) -> list[tuple[str, str, float]]:
    """Network, link and what is kept: every link for those of ``NETWORKS``, PCIe 5 for those of today."""
    pairs = [(name, link) for name in names if name != "gpt-96" for link in (LINKS if name in NETWORKS else ("pcie5",))]
    return [(network, link, kept) for network, link in pairs for kept in KEPT]


def grid(arguments: argparse.Namespace) -> Told:
    """All cases, printed as they come; with ``--redo`` those of a results file whose gap was missed, beside the others
    as they are.
    """
    cases = cases_of(arguments.networks)
    known = [
        row for row in (rows_in(arguments.redo) if arguments.redo else []) if row["gap"] <= wanted_gap(row["network"])
    ]
    found = {(row["network"], row["link"], row["kept"]): row for row in known}
    names = tuple(name for name in policy_names() if name != "keep-all")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        todo = [case for case in cases if case not in found]
        waiting = {pool.submit(one, *case, arguments.time_limit, arguments.gap, names): case for case in todo}
        for done in as_completed(waiting):
            row = {**done.result(), "time_limit_s": arguments.time_limit}
            found[waiting[done]] = row
            print(line(row), flush=True)
    yield from (({**found[case], "gap_wanted": wanted_gap(case[0])}, "") for case in cases)


def wall(arguments: argparse.Namespace) -> Told:
    """The time until the plan is within the wanted gap, or the limit."""
    for network, gap, limit_s in WALL_CASES:
        if network in arguments.networks:
            link = "pcie5" if network == "gpt-96" else "pcie3"
            for kept in (0.5,) if network == "gpt-96" else (0.7, 0.5, 0.3):
                row = one(network, link, kept, limit_s * arguments.patience, gap, ())
                row |= {"gap_wanted": gap, "limit_s": limit_s}
                yield row, line(row)


def seeds(arguments: argparse.Namespace) -> Told:
    """The cases of a results file with the largest gaps, with five seeds each: the spread of what is found."""
    results = rows_in(arguments.results or RESULTS)
    for row in sorted(results, key=lambda row: -row["gap"])[:HARDEST]:
        profile = instance(row["network"], row["link"])
        budget_bytes = budget_of(profile, row["kept"])
        found = [
            plan(profile, budget_bytes, time_limit_s=arguments.time_limit, gap=arguments.gap, seed=seed)
            for seed in range(SEEDS)
        ]
        overheads = sorted(one.prediction.overhead for one in found)
        shown = " / ".join(f"{overhead:.2%}" for overhead in overheads)
        told = table_row(row["network"], row["link"], f"{row['kept']:.0%}", shown)
        yield {name: row[name] for name in ("network", "link", "kept")} | {"overheads": overheads}, told


def caps(arguments: argparse.Namespace) -> Told:
    """The policy PoocH as it is and with its caps raised: sets of keeps, groups of flips, flips."""
    own = (pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS)
    for network, link, kept in cases_of(arguments.networks):
        profile = instance(network, link)
        given = PolicyInput(Problem.of(profile), budget_of(profile, kept))
        overheads = []
        for figures in (own, *RAISED):
            pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS = figures
            overheads.append(run_policy("pooch", given).simulation.step_s / given.problem.in_core_s - 1)
        row = {"network": network, "link": link, "kept": kept, "caps": [own, *RAISED], "overheads": overheads}
        yield row, table_row(network, link, f"{kept:.0%}", *(f"{one:.2%}" for one in overheads))
    pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS = own


def uses(arguments: argparse.Namespace) -> Told:
    """Of the values that TFLMS may swap: how many levels backward's uses of one value are apart, at most."""
    for network in NETWORKS:
        given = PolicyInput(Problem.of(instance(network, "pcie3")), 1)
        values = {record: value for value, record in enumerate(given.problem.replay.value_of)}
        levels: dict[int, list[int]] = {}
        for index, point in enumerate(given.profile.points):
            value = values.get(given.profile.handles[point.handle].value, -1)
            if point.kind is PointKind.USE and value >= 0:
                levels.setdefault(value, []).append(level_at(given, index))
        waits = level_distances(given)
        apart = [max(levels[value]) - min(levels[value]) for value in waits]
        row = {"values": len(waits), "apart": sum(map(bool, apart)), "most": max(apart), "wait": median(waits.values())}
        told = table_row(network, row["values"], row["apart"], row["most"], f"{row['wait']:.0f}")
        yield {"network": network, **row}, told


def measured(arguments: argparse.Namespace) -> Told:
    """Profiles as ``pooch profile`` wrote them, with everything that ``pooch plan`` asks of them unasked."""
    for path, share in product(map(Path, arguments.profiles), SHARES):
        profile, started_s = Profile.load(path), time.perf_counter()
        found = plan(profile, share, time_limit_s=arguments.time_limit)
        row: Row = {"network": path.name.split(".")[0], "budget": share, **costs_of(found)}
        row |= {"status": found.solve.status, "wall_s": time.perf_counter() - started_s}
        shown = (f"{row['overhead']:.2%}", f"{row['gap']:.2%}", f"{row['wall_s']:.1f} s", row["status"])
        yield row | {"holds_arena": found.holds_arena}, table_row(row["network"], share, *shown)


def ranks(arguments: argparse.Namespace) -> Told:
    """Ranks of one host that share its link: plans that each makes for itself, and plans that know of the others. Both
    are simulated on the shared link.
    """
    for network, kept in product(("resnet50-b256", "unet3d-192", "gpt2-medium", "bert-large"), (0.7, 0.5, 0.3)):
        profile = instance(network, "pcie5")
        budget_bytes = budget_of(profile, kept)
        ask = partial(plan, profile, budget_bytes, time_limit_s=arguments.time_limit, gap=arguments.gap)
        alone, together = ask(), ask(ranks_per_host=RANKS)
        row: Row = {"network": network, "kept": kept, "ranks": RANKS, "promised_alone": alone.prediction.overhead}
        for name, found in (("alone", alone), ("together", together)):
            step_s = simulate_plan(Problem.of(profile, found, ranks=RANKS), found).step_s
            row[name] = step_s / found.prediction.in_core_step_s - 1
        row["gap"] = together.solve.gap
        shown = (f"{row[name]:.2%}" for name in ("promised_alone", "alone", "together", "gap"))
        yield row, table_row(network, f"{kept:.0%}", *shown)


def milp(arguments: argparse.Namespace) -> Told:
    """What the integer program PLAN proposes, beside what the search ends with: the best plan of another policy, PLAN's
    relaxation rounded (for a budget smaller by the largest value, as the search asks for it), the same after a descent,
    PLAN with its integrality after ``--time-limit`` seconds and a descent, a walk of 250 evaluations per value from
    everything swapped, and what a results file of grid says the whole search found.
    """
    searched = {(row["network"], row["link"], row["kept"]): row["overhead"] for row in rows_in(RESULTS)}
    columns = ("policy", "rounded", "rounded_descended", "integral_descended", "walk", "search")
    print(table_head("network", "kept", *columns))
    for network, kept in product(NETWORKS, MILP_KEPT):
        row = proposed(network, kept, arguments.time_limit) | {"search": searched.get((network, MILP_LINK, kept))}
        cells = ("over budget" if row[name] is None else f"{row[name]:.2%}" for name in columns)
        yield row, table_row(network, f"{kept:.0%}", *cells)


def proposed(network: str, kept: float, limit_s: float) -> Row:
    profile = instance(network, MILP_LINK)
    budget_bytes = budget_of(profile, kept)
    problem = Problem.of(profile)
    values = tuple(movable(problem))
    walker = Walker(values, Incumbents(problem, budget_bytes, None))
    largest = max(int(problem.rounded_bytes[value]) for value in values)

    def overhead(found: EvaluatedPlan) -> float | None:
        return found.step_s / problem.in_core_s - 1 if found.peak_bytes <= budget_bytes else None

    def solved(budget: int, is_relaxed: bool) -> EvaluatedPlan | None:
        limits = SolverLimits(limit_s, gap=0.005, absolute_gap=5e-4 * problem.step_s)
        codes, _ = solve_fluid(problem, Request(budget, values), "highs", limits, relaxed=is_relaxed)
        return None if codes is None else walker.try_styles(codes, "ilp")

    given = PolicyInput(problem, budget_bytes)
    policies = (policy_overhead(name, given) for name in ("greedy", "pooch"))
    rounded, integral = solved(budget_bytes - largest, True), solved(budget_bytes, False)
    start = walker.try_styles(codes_of(swap_all(problem)), "swap-all", range(len(STYLE_OF)))
    walked = walker.anneal(start, Allowance(evaluations=EVALUATIONS_PER_VALUE * len(values)), temperature=0.02, seed=0)
    return {
        "network": network,
        "link": MILP_LINK,
        "kept": kept,
        "policy": min((one for one in policies if one is not None), default=inf),
        "rounded": rounded and overhead(rounded),
        "rounded_descended": rounded and overhead(walker.descend(rounded, Allowance(DESCENT_S))),
        "integral_descended": integral and overhead(walker.descend(integral, Allowance(DESCENT_S))),
        "walk": overhead(walker.descend(walked, Allowance(DESCENT_S))),
    }


def line(row: Row) -> str:
    fluid = "" if row["fluid"] is None else f"{row['fluid']:.2%}"
    margin = "" if row.get("margin") is None else f"{row['margin']:+.2%}"
    met = "" if row["gap"] <= row["gap_wanted"] else " (!)"
    best = min((v, k) for k, v in row["policies"].items() if v is not None)[1] if margin else ""
    overhead, bound, gap = (f"{row[name]:.2%}" for name in ("overhead", "bound", "gap"))
    costs = (f"{row['kept']:.0%}", overhead, bound, gap + met, fluid, f"{margin} {best}", f"{row['wall_s']:.1f} s")
    return table_row(row["network"], row["link"], *costs)


def summary(rows: list[Row]) -> Row:
    margins = [row["margin"] for row in rows if row["margin"] is not None]
    return {
        "cases": len(rows),
        "over_budget": sum(row["peak_bytes"] > row["budget_bytes"] for row in rows),
        "worse_than_a_policy": sum(row["is_worse"] for row in rows),
        "gap_met": sum(row["gap"] <= row["gap_wanted"] for row in rows),
        "median_gap": median(row["gap"] for row in rows),
        "largest_gap": max(row["gap"] for row in rows),
        "median_margin": median(margins) if margins else None,
        "margins_above_a_thousandth": sum(margin > 0.001 for margin in margins),
        "median_wall_s": median(row["wall_s"] for row in rows),
    }


WHAT = {one.__name__: one for one in (grid, wall, seeds, caps, uses, ranks, measured, milp)}


def main() -> int:
    parser = parser_of(
        __doc__,
        time_limit=25.0,
        patience=(1.0, "wall: limit, as a multiple of the time asked for"),
        gap=(0.001, "a plan is done within this of the bound"),
        jobs=(os.cpu_count() or 1, "processes (grid)"),
        redo=(None, "grid: a results file; only cases whose gap was missed are planned again"),
    )
    parser.add_argument("what", choices=(*WHAT, "table"))
    parser.add_argument("results", nargs="?", help="for table and seeds: a results file of grid")
    parser.add_argument(
        "--networks", nargs="+", default=[*NETWORKS, "gpt-96"], choices=[*NETWORKS, "gpt-96", *OF_TODAY]
    )
    parser.add_argument("--profiles", nargs="+", default=[], metavar="FILE", help="measured: profiles to plan")
    arguments = parser.parse_args()
    if arguments.what == "table":
        print(*map(line, rows_in(arguments.results)), sep="\n")
        return 0
    rows = []
    for row, told in WHAT[arguments.what](arguments):
        rows.append(row)
        if told:
            print(told, flush=True)
    found = summary(rows) if arguments.what == "grid" else {}
    print(json.dumps(found, indent=2))
    write_results(arguments.output, {**facts_of_run(arguments), "summary": found, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
