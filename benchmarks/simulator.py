"""How long one simulation, and one schedule, of a large step takes.

    python -m benchmarks.simulator -o benchmarks/results/simulator.json

The steps are an instance of 96 layers as it is, and the same with each op cut into two of half its length.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import facts_of_run, write_results
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.simulate import simulate, swap_all_on_demand

ROOT = Path(__file__).resolve().parent.parent
KEPT = 0.3


def cut(profile: Profile) -> Profile:
    """The same step with each op in two parts: the first bears and writes, both take half the time."""
    replace = msgspec.structs.replace
    ops = []
    for op in profile.ops:
        half = replace(op, duration_s=op.duration_s / 2)
        ops += [half, replace(half, inputs=(), outputs=(), writes=(), workspace_bytes=0, random=False)]
    points = tuple(replace(point, op=2 * point.op) for point in profile.points)
    finer = replace(profile, ops=tuple(ops), points=points)
    new_tick = {tick: finer.op_ticks[2 * index + 1] for index, tick in enumerate(profile.op_ticks)}
    new_tick.update(zip(profile.point_ticks, finer.point_ticks, strict=True))
    values = tuple(
        replace(
            value,
            born=2 * value.born if value.born >= 0 else -1,
            forward_death=new_tick[value.forward_death],
            freed=new_tick[value.freed],
        )
        for value in profile.values
    )
    return replace(finer, values=values)


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Median of ``times`` runs."""
    taken = []
    for _ in range(times):
        started_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started_s)
    return 1000 * median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=21)
    parser.add_argument("-o", "--output", default=None, help="write the figures as JSON here")
    arguments = parser.parse_args()
    whole = Profile.load(ROOT / "benchmarks" / "instances" / "gpt-96-h200.json.gz")
    rows = []
    for name, profile in (("gpt-96", whole), ("gpt-96, each op in two", cut(whole))):
        given = PolicyInput.of(profile, 0)
        problem = given.problem
        smallest = swap_all_on_demand(problem).peak_bytes
        budget_bytes = int(smallest + KEPT * (profile.in_core_peak_bytes - smallest))
        chosen = run_policy("greedy", PolicyInput(profile, problem, budget_bytes))
        rows.append(
            {
                "step": name,
                "values": problem.value_count,
                "ops": len(profile.ops),
                "simulate_ms": milliseconds(lambda p=problem, c=chosen: simulate(p, c.schedule), arguments.times),
                "fit_ms": milliseconds(
                    lambda p=problem, c=chosen, b=budget_bytes: fit(p, c.wish, b, recorded=False), arguments.times
                ),
            }
        )
        print(json.dumps(rows[-1]))
    write_results(arguments.output, {**facts_of_run(arguments), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
