"""Plans of the instances: overhead, proven bound and gap at five budgets on four links, and every other policy beside.

    python -m benchmarks.planning grid -o benchmarks/results/planning.json       # 6 networks x 4 links x 5 budgets
    python -m benchmarks.planning grid --networks llama-7b qwen2-7b vit-l whisper-large -o ...  # on an H100 and pcie5
    python -m benchmarks.planning wall -o benchmarks/results/planning-wall.json  # time to a wanted gap, one at a time
    python -m benchmarks.planning seeds -o benchmarks/results/planning-seeds.json  # the ten hardest, five seeds each
    python -m benchmarks.planning pooch -o benchmarks/results/planning-pooch.json  # PoocH's setting
    python -m benchmarks.planning table benchmarks/results/planning.json         # the table of benchmarks/README.md
    python -m benchmarks.planning caps [--networks llama-7b ...]                 # PoocH's caps, raised
    python -m benchmarks.planning uses                                           # how far apart backward uses a value
    python -m benchmarks.planning ranks -o benchmarks/results/planning-ranks.json  # eight on a host, together and alone
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import facts_of_run, write_results
from poochplan import Profile
from poochplan.formats.profile import PointKind
from poochplan.planner import for_machine, plan, smallest_budget
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.policies import pooch as pooch_policy
from poochplan.planner.policies.swapping import level_at, level_distances
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import simulate
from poochplan.planner.whatif import shared

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "planning.json"
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
WALL_CASES = (
    ("resnet50-b256", 0.005, 10.0),
    ("unet3d-192", 0.005, 10.0),
    ("gpt2-medium", 0.02, 60.0),
    ("gpt-96", 0.04, 300.0),
)


def instance(network: str, link: str) -> Profile:
    """The step of ``network`` on the device that goes with ``link``."""
    device = "h200" if network == "gpt-96" else "h100" if network in OF_TODAY else LINKS[link]
    return for_machine(Profile.load(ROOT / "benchmarks" / "instances" / f"{network}-{device}.json.gz"), link=link)


def budget_of(profile: Profile, kept: float) -> int:
    """The budget that keeps ``kept`` of what decisions can move."""
    smallest = smallest_budget(profile)
    return int(smallest + kept * (profile.in_core_peak_bytes - smallest))


def wanted_gap(network: str) -> float:
    return WANTED_OF_TRANSFORMERS if network in TRANSFORMERS else WANTED_GAP


def one(
    network: str, link: str, kept: float, time_limit_s: float, gap: float, policies: tuple[str, ...]
) -> dict[str, Any]:
    """Plans one case, and asks ``policies`` for their plans."""
    profile = instance(network, link)
    budget_bytes = budget_of(profile, kept)
    started_s = time.perf_counter()
    found = plan(profile, budget_bytes, time_limit_s=time_limit_s, gap=gap)
    wall_s = time.perf_counter() - started_s
    in_core_s = found.prediction.in_core_step_s
    bound_s = found.solve.bound_s
    assert bound_s is not None
    row: dict[str, Any] = {
        "network": network,
        "link": link,
        "kept": kept,
        "values": len(found.values),
        "budget_bytes": budget_bytes,
        "peak_bytes": found.prediction.peak_bytes,
        "overhead": found.prediction.overhead,
        "bound": bound_s / in_core_s - 1,
        "gap": found.solve.gap,
        "gap_wanted": wanted_gap(network),
        "fluid": None if found.solve.objective_s is None else found.solve.objective_s / in_core_s,
        "status": found.solve.status,
        "wall_s": wall_s,
        "policies": {},
    }
    given = PolicyInput.of(profile, budget_bytes)
    for name in policies:
        candidate = run_policy(name, given)
        fits = candidate.peak_bytes <= budget_bytes
        row["policies"][name] = candidate.simulation.step_s / in_core_s - 1 if fits else None
    others = [overhead for overhead in row["policies"].values() if overhead is not None]
    row["margin"] = min(others) - row["overhead"] if others else None
    row["is_worse"] = any(other < row["overhead"] for other in others)
    return row


def cases_of(names: list[str]) -> list[tuple[str, str, float]]:
    """Network, link and what is kept: every link for those of ``NETWORKS``, PCIe 5 for those of today."""
    pairs = [(name, link) for name in names if name != "gpt-96" for link in (LINKS if name in NETWORKS else ("pcie5",))]
    return [(network, link, kept) for network, link in pairs for kept in KEPT]


def grid(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, or with ``--redo`` those of a results file whose gap was missed; the others are taken over."""
    cases = cases_of(arguments.networks)
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    if arguments.redo:
        for row in json.loads(Path(arguments.redo).read_text())["rows"]:
            if row["gap"] <= wanted_gap(row["network"]):
                found[row["network"], row["link"], row["kept"]] = row
    names = tuple(name for name in policy_names() if name != "keep-all")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        todo = [case for case in cases if case not in found]
        waiting = {pool.submit(one, *case, arguments.time_limit, arguments.gap, names): case for case in todo}
        for done in as_completed(waiting):
            row = {**done.result(), "time_limit_s": arguments.time_limit}
            found[waiting[done]] = row
            print(line(row), flush=True)
    return [{**found[case], "gap_wanted": wanted_gap(case[0])} for case in cases]


def wall(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The time until the plan is within the wanted gap, or the limit."""
    rows = []
    for network, gap, limit_s in WALL_CASES:
        if network in arguments.networks:
            link = "pcie5" if network == "gpt-96" else "pcie3"
            for kept in (0.5,) if network == "gpt-96" else (0.7, 0.5, 0.3):
                row = one(network, link, kept, limit_s * arguments.patience, gap, ())
                rows.append({**row, "gap_wanted": gap, "limit_s": limit_s})
                print(line(rows[-1]), flush=True)
    return rows


def seeds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of a results file with the largest gaps, with five seeds each: the spread of what is found."""
    results = json.loads(Path(arguments.results or RESULTS).read_text())["rows"]
    rows = []
    for row in sorted(results, key=lambda row: -row["gap"])[:HARDEST]:
        profile = instance(row["network"], row["link"])
        budget_bytes = budget_of(profile, row["kept"])
        found = [
            plan(profile, budget_bytes, time_limit_s=arguments.time_limit, gap=arguments.gap, seed=seed)
            for seed in range(SEEDS)
        ]
        overheads = sorted(one.prediction.overhead for one in found)
        rows.append({name: row[name] for name in ("network", "link", "kept")} | {"overheads": overheads})
        shown = " / ".join(f"{overhead:.2%}" for overhead in overheads)
        print(f"| {row['network']} | {row['link']} | {row['kept']:.0%} | {shown} |", flush=True)
    return rows


def pooch_profile(link: str) -> Profile:
    """The step of PoocH's setting on a V100 with that link."""
    return for_machine(Profile.load(ROOT / "benchmarks" / "instances" / "resnet50-b590-v100.json.gz"), link=link)


def pooch(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """ResNet-50, batch 590, fp32, V100 of 16 GiB with 0.5 GiB set aside (PoocH published +38% and +28%)."""
    rows = []
    for link in ("pcie3", "nvlink2"):
        profile = pooch_profile(link)
        found = plan(profile, "15.5GiB", time_limit_s=arguments.time_limit, gap=arguments.gap)
        rows.append(
            {
                "network": "resnet50-b590",
                "link": link,
                "in_core_peak_bytes": profile.in_core_peak_bytes,
                "overhead": found.prediction.overhead,
                "bound": (found.solve.bound_s or 0.0) / found.prediction.in_core_step_s - 1,
                "gap": found.solve.gap,
                "wall_s": found.solve.wall_s,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def caps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The policy PoocH as it is and with its caps raised: sets of keeps, groups of flips, flips."""
    rows = []
    own = (pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS)
    for network, link, kept in cases_of(arguments.networks):
        profile = instance(network, link)
        given = PolicyInput.of(profile, budget_of(profile, kept))
        overheads = []
        for figures in (own, *RAISED):
            pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS = figures
            overheads.append(run_policy("pooch", given).simulation.step_s / given.problem.in_core_s - 1)
        rows.append({"network": network, "link": link, "kept": kept, "caps": [own, *RAISED], "overheads": overheads})
        shown = " | ".join(f"{overhead:.2%}" for overhead in overheads)
        print(f"| {network} | {link} | {kept:.0%} | {shown} |", flush=True)
    pooch_policy.KEEP_SETS, pooch_policy.FLIP_GROUPS, pooch_policy.FLIP_EVALUATIONS = own
    return rows


def uses(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the values that TFLMS may swap: how many levels backward's uses of one value are apart, at most."""
    rows = []
    for network in NETWORKS:
        given = PolicyInput.of(instance(network, "pcie3"), 1)
        values = {record: value for value, record in enumerate(given.problem.replay.value_of)}
        levels: dict[int, list[int]] = {}
        for index, point in enumerate(given.profile.points):
            value = values.get(given.profile.handles[point.handle].value, -1)
            if point.kind is PointKind.USE and value >= 0:
                levels.setdefault(value, []).append(level_at(given, index))
        waits = level_distances(given)
        apart = [max(levels[value]) - min(levels[value]) for value in waits]
        row = {"values": len(waits), "apart": sum(map(bool, apart)), "most": max(apart), "wait": median(waits.values())}
        rows.append({"network": network, **row})
        print(f"| {network} | {row['values']} | {row['apart']} | {row['most']} | {row['wait']:.0f} |", flush=True)
    return rows


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Profiles as ``pooch profile`` wrote them, with everything that ``pooch plan`` asks of them unasked."""
    rows = []
    for path, share in product(map(Path, arguments.profiles), SHARES):
        profile, started_s = Profile.load(path), time.perf_counter()
        found = plan(profile, share, time_limit_s=arguments.time_limit)
        rows.append(
            {
                "network": path.name.split(".")[0],
                "budget": share,
                "overhead": found.prediction.overhead,
                "gap": found.solve.gap,
                "wall_s": time.perf_counter() - started_s,
                "status": found.solve.status,
                "holds_arena": found.holds_arena,
            }
        )
        row = rows[-1]
        shown = f"{row['overhead']:.2%} | {row['gap']:.2%} | {row['wall_s']:.1f} s | {row['status']}"
        print(f"| {row['network']} | {share} | {shown} |", flush=True)
    return rows


def ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ranks of one host that share its link: plans that each makes for itself, and plans that know of the others. Both
    are simulated on the shared link.
    """
    rows = []
    for network in ("resnet50-b256", "unet3d-192", "gpt2-medium", "bert-large"):
        profile = instance(network, "pcie5")
        problem = build_problem(shared(profile, RANKS))
        for kept in (0.7, 0.5, 0.3):
            budget_bytes = budget_of(profile, kept)
            ask = partial(plan, profile, budget_bytes, time_limit_s=arguments.time_limit, gap=arguments.gap)
            alone, together = ask(), ask(ranks_per_host=RANKS)
            row = {"network": network, "kept": kept, "ranks": RANKS, "promised_alone": alone.prediction.overhead}
            for name, found in (("alone", alone), ("together", together)):
                row[name] = simulate(problem, schedule_of(found, problem)).step_s / problem.in_core_s - 1
            rows.append(row | {"gap": together.solve.gap})
            figures = " | ".join(f"{row[name]:.2%}" for name in ("promised_alone", "alone", "together"))
            print(f"| {network} | {kept:.0%} | {figures} | {together.solve.gap:.2%} |", flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table, as Markdown."""
    fluid = "" if row["fluid"] is None else f"{row['fluid']:.2%}"
    margin = "" if row.get("margin") is None else f"{row['margin']:+.2%}"
    met = "" if row["gap"] <= row["gap_wanted"] else " (!)"
    best = min((v, k) for k, v in row["policies"].items() if v is not None)[1] if margin else ""
    return (
        f"| {row['network']} | {row['link']} | {row['kept']:.0%} | {row['overhead']:.2%} | {row['bound']:.2%} | "
        f"{row['gap']:.2%}{met} | {fluid} | {margin} {best} | {row['wall_s']:.1f} s |"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and medians over the cases."""
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


WHAT = {
    "grid": grid, "wall": wall, "seeds": seeds, "pooch": pooch, "caps": caps, "uses": uses, "ranks": ranks,
    "measured": measured,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*WHAT, "table"))
    parser.add_argument("results", nargs="?", help="for table and seeds: a results file of grid")
    parser.add_argument(
        "--networks", nargs="+", default=[*NETWORKS, "gpt-96"], choices=[*NETWORKS, "gpt-96", *OF_TODAY]
    )
    parser.add_argument("--profiles", nargs="+", default=[], metavar="FILE", help="measured: profiles to plan")
    parser.add_argument("--time-limit", type=float, default=25.0, help="seconds per plan")
    parser.add_argument("--patience", type=float, default=1.0, help="wall: limit, as a multiple of the time asked for")
    parser.add_argument("--gap", type=float, default=0.001, help="a plan is done within this of the bound")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (grid)")
    parser.add_argument("--redo", help="grid: a results file; only cases whose gap was missed are planned again")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    if arguments.what == "table":
        for row in json.loads(Path(arguments.results).read_text())["rows"]:
            print(line(row))
        return 0
    rows = WHAT[arguments.what](arguments)
    found = summary(rows) if arguments.what == "grid" else {}
    print(json.dumps(found, indent=2))
    if arguments.output:
        data = {**facts_of_run(arguments), "summary": found, "rows": rows}
        write_results(arguments.output, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
