"""The settings of the systems before this one, simulated: what each would take and cost under our plans.

    make bench                                                                # all of them
    python -m benchmarks.sources --settings vdnn-vgg16 -o results.json        # some; other rows of the file stay
    python -m benchmarks.sources --table benchmarks/results/sources.json      # the rows of benchmarks/pages/sources.md

Nothing is run: profiles are taken without memory, durations are a roofline's (``profiler/fake/roofline.py``) and copies
a link's preset (``formats/profile.py``). The published figures beside were measured on real machines. Where a setting
has no plan, its smallest possible peak says so, and the plan is that of the largest batch that has one.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
import msgspec

from benchmarks.facts import Row, facts_of_run, known_rows, parser_of, rows_in, table_row, write_results
from benchmarks.plans import costs_of, predicted
from benchmarks.settings import MARGIN, SETTINGS, SMALL, Setting
from poochplan import Plan, Profile, Workload
from poochplan.errors import InfeasibleError
from poochplan.fitting.probes import Machine, Probes, family_of
from poochplan.planner import plan, smallest_budget
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.simulator.problem import Problem
from poochplan.units import parse_bytes

SWAPPING = ("swap-all-on-demand", "vdnn", "earliest-first", "tflms")
"""Policies that never recompute. ``tflms`` is tuned as the source's tool does, the first one not at all."""
MOST_BATCH = 1 << 20


def probes_of(build: Callable[..., Workload], machine: Machine) -> Probes:
    return Probes(family_of(build, "batch_size"), machine, say)


@functools.cache
def batches(build: Callable[..., Workload], budget_bytes: int) -> tuple[int | None, int | None]:
    """The largest batch that fits with everything kept, and the largest that has a plan; None where there is none.

    They are asked of bytes alone, which no device changes.
    """
    probes = probes_of(build, Machine(budget_bytes))
    start = probes.family.own or 1
    in_core, most = (probes.largest(size, start, 1, MOST_BATCH, 1).value for size in (Probes.in_core, Probes.smallest))
    return in_core, most


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def step_of(setting: Setting, batch: int) -> Profile:
    """The step with that batch on the setting's machine."""
    if setting.profile is not None:
        return setting.profile()
    assert setting.build is not None
    return probes_of(setting.build, Machine(0, setting.device, setting.link)).profile(batch)


def row_of(setting: Setting, arguments: argparse.Namespace) -> Row:
    """Bytes, overhead and bound of one setting, of the largest batch that has a plan where its own has none."""
    started_s = time.perf_counter()
    memory_bytes = parse_bytes(setting.memory) - parse_bytes(MARGIN)
    in_core, most = batches(setting.build, memory_bytes) if setting.build and not setting.share else (None, None)
    batch = setting.batch or round((setting.multiple or 1.0) * (in_core or 1))
    row: Row = {
        **{name: getattr(setting, name) for name in ("system", "network", "device", "link", "memory", "published")},
        "assumed": setting.assumed,
        "batch": batch,
        "in_core_batch": in_core,
        "largest_batch": most,
    }
    profile = step_of(setting, batch)
    budget_bytes = int(setting.share * profile.in_core_peak_bytes) if setting.share else memory_bytes
    row |= {"budget_bytes": budget_bytes, **peaks(profile)}
    row["fits"] = row["smallest_peak_bytes"] <= budget_bytes
    if not row["fits"] and most:
        profile, batch = step_of(setting, most), most
        row["peaks_of_planned"] = peaks(profile)
    row["planned_batch"] = batch
    limit_s = setting.patience * arguments.time_limit
    row["plan"] = planned(profile, budget_bytes, setting.host_budget, limit_s, arguments)
    if setting.compared:
        row["exposed"] = exposed(profile, budget_bytes, row["plan"], limit_s, arguments)
    return row | {"time_limit_s": limit_s, "wall_s": time.perf_counter() - started_s}


def peaks(profile: Profile) -> dict[str, int]:
    return {"in_core_peak_bytes": profile.in_core_peak_bytes, "smallest_peak_bytes": smallest_budget(profile)}


def planned(
    profile: Profile, budget_bytes: int, host_budget: int | None, limit_s: float, arguments: argparse.Namespace
) -> Row | None:
    """Figures of the plan; None where none was found."""
    try:
        found = plan(
            profile, budget_bytes, host_budget=host_budget, time_limit_s=limit_s, gap=arguments.gap,
            seed=arguments.seed, threads=arguments.threads,
        )  # fmt: skip
    except InfeasibleError as error:
        say(str(error))
        return None
    return figures(found)


def figures(found: Plan) -> Row:
    """Times as shares of the in-core step."""
    prediction, costs = found.prediction, costs_of(found)
    in_core_s = prediction.in_core_step_s
    return predicted(found, "in_core_step_s", "peak_bytes", "overhead", "out_bytes") | {
        "bound": costs["bound"],
        "gap": costs["gap"],
        "status": str(found.solve.status),
        "stall_share": prediction.stall_s / in_core_s,
        "replay_share": prediction.replay_s / in_core_s,
        "solve_s": costs["wall_s"],
    }


def exposed(
    profile: Profile, budget_bytes: int, ours: Row | None, limit_s: float, arguments: argparse.Namespace
) -> dict[str, float | None]:
    """How long the step waits for copies, as a share of the in-core step: each swapping policy's plan, and ours.

    None where a policy's plan does not fit.
    """
    given = PolicyInput(Problem.of(profile), budget_bytes)
    shares: dict[str, float | None] = {}
    for name in SWAPPING:
        candidate = run_policy(name, given)
        fits = candidate.peak_bytes <= budget_bytes
        shares[name] = candidate.simulation.stall_s / profile.times.step_s if fits else None
    alone = planned(without_replays(profile), budget_bytes, None, limit_s, arguments)
    shares["ours, swapping alone"] = None if alone is None else alone["stall_share"]
    shares["ours"] = None if ours is None else ours["stall_share"]
    return shares


def without_replays(profile: Profile) -> Profile:
    """The same step of which nothing can be recomputed."""
    replace = msgspec.structs.replace
    return replace(profile, ops=tuple(replace(op, opaque=True) for op in profile.ops))


def line(row: Row) -> str:
    found = row["plan"]
    cost = "no plan found" if found is None else f"{found['overhead']:.2%} (bound {_share(found['bound'])})"
    if row["planned_batch"] != row["batch"]:
        cost += f" at {row['planned_batch']}"
    largest_batch = "" if row["largest_batch"] is None else _times(row["largest_batch"], row["in_core_batch"])
    verdict = "" if row["fits"] else ", above the memory: **no plan**"
    return table_row(
        row["system"], f"{row['network']}, batch {_times(row['batch'], row['in_core_batch'])}",
        f"{row['device']}, {row['link']}, {_gib(row['budget_bytes'])}", _gib(row["in_core_peak_bytes"]),
        _gib(row["smallest_peak_bytes"]) + verdict, largest_batch, cost, row["published"],
    )  # fmt: skip


def _times(batch: int, in_core: int | None) -> str:
    return f"{batch:,} ({batch / in_core:.1f} x)" if in_core else f"{batch:,}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.2%}"


def waits(row: Row) -> str:
    """How long each plan waits for copies, as a line of Markdown; empty where nobody was asked."""
    shares = row.get("exposed", {})
    text = ", ".join(
        f"{name} {_share(share) if share is not None else 'over budget'}" for name, share in shares.items()
    )
    return f"* {row['system']}, {row['link']}: {text}" if text else ""


def main() -> int:
    parser = parser_of(
        __doc__,
        time_limit=20.0,
        gap=(0.001, "a plan is done within this of the bound"),
        seed=0,
        threads=2,
        table=(None, "print the table of these results, and plan nothing"),
    )
    every = SETTINGS | SMALL
    parser.add_argument(
        "--settings", nargs="+", choices=every, default=[*SETTINGS], metavar="NAME", help="default: all"
    )
    arguments = parser.parse_args()
    if arguments.table:
        known = rows_in(arguments.table)
        print("\n".join([*map(line, known), "", *filter(None, map(waits, known))]))
        return 0
    facts = facts_of_run(arguments)
    rows = {row["setting"]: row for row in known_rows(arguments.output)}
    for name in arguments.settings:
        row = {"setting": name, "commit": facts["commit"], **row_of(every[name], arguments)}
        rows[name] = row
        print("\n".join(filter(None, (line(row), waits(row)))), flush=True)
        write_results(arguments.output, {**facts, "rows": [rows[name] for name in every if name in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
