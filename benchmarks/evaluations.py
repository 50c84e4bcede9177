"""Seconds of one evaluation: decisions scheduled and simulated in plain Python, and by the compiled evaluator.

    python -m benchmarks.evaluations -o benchmarks/results/evaluations.json

For each network decisions are drawn at random, and swap-all is among them. Each is evaluated in all four styles within
two budgets, plain and compiled right after each other, and both must give the same. ``first_ms`` are evaluations of
decisions whose replays the evaluator has not met. Compiling and loading are those of processes of their own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import facts_of_run, write_results
from benchmarks.pairs import ratio_of_pairs
from benchmarks.planning import NETWORKS, budget_of, instance
from poochplan.formats.plan import Decision
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator, codes_of, library
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import swap_all, try_style

KEPT = (0.5, 0.2)
START_UP = """
import time
from poochplan.planner.simulator.evaluator import library
began_s = time.perf_counter()
assert library(None) is not None
print(time.perf_counter() - began_s)
"""


def mixes(problem: Problem, count: int) -> list[tuple[Decision, ...]]:
    """Random decisions, each of those that are possible as often, and swap-all."""
    rng = random.Random(0)
    found = [swap_all(problem)]
    for _ in range(count):
        choices = [
            [Decision.KEEP] if reason else [Decision.KEEP, Decision.SWAP, *[Decision.RECOMPUTE] * (replay is not None)]
            for reason, replay in zip(problem.must_keep, problem.replay.replays, strict=True)
        ]
        found.append(tuple(rng.choice(some) for some in choices))
    return found


def timed(run: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """Seconds of a run, the median of ``times``, and what it gave."""
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        found = run()
        taken.append(time.perf_counter() - began_s)
    return median(taken), found


def network_row(network: str, count: int, times: int) -> dict[str, Any]:
    """One network at its slowest link."""
    profile = instance(network, "pcie5" if network == "gpt-96" else "pcie3")
    problem = build_problem(profile)
    evaluator = Evaluator(problem)
    pairs: dict[str, list[tuple[float, float]]] = {"mix": [], "swap-all": []}
    first_s = []
    for number, wish in enumerate(mixes(problem, count)):
        codes = codes_of(wish).tobytes()
        for kept in KEPT:
            budget_bytes = budget_of(profile, kept)
            for style, named in enumerate(STYLE_OF):
                arguments = (problem, "x", wish, budget_bytes, named)
                once_s, found = timed(lambda a=arguments: try_style(*a, recorded=False))
                first, _ = timed(lambda s=style, b=budget_bytes, c=codes: evaluator.evaluate_codes(c, b, s))
                again_s, fast = timed(lambda s=style, b=budget_bytes, c=codes: evaluator.evaluate_codes(c, b, s), times)
                moved_bytes = found.simulation.out_bytes + found.simulation.in_bytes
                assert fast[:3] == (found.simulation.step_s, found.peak_bytes, moved_bytes)
                pairs["mix" if number else "swap-all"].append((once_s, again_s))
                if number and kept == KEPT[0] and not style:
                    first_s.append(first)
    row: dict[str, Any] = {"network": network, "values": problem.value_count, "ticks": problem.tick_count}
    for name, taken in pairs.items():
        plain_ms, compiled_ms = (1e3 * median(each) for each in zip(*taken, strict=True))
        ratio = ratio_of_pairs(taken)
        row[name] = {
            "plain_ms": round(plain_ms, 3),
            "compiled_ms": round(compiled_ms, 4),
            "slowest_compiled_ms": round(1e3 * max(each for _, each in taken), 4),
            "plain_per_s": round(1e3 / plain_ms),
            "compiled_per_s": round(1e3 / compiled_ms),
            "median_ratio": ratio["median_ratio"],
            "interval_95": ratio["interval_95"],
        }
    return {**row, "first_ms": round(1e3 * median(first_s), 4)}


def start_up(times: int) -> dict[str, float]:
    """Seconds until the first evaluation is ready: compiled into an empty cache, and loaded from it."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        said = [
            float(
                subprocess.run(
                    [sys.executable, "-c", START_UP], env=environment, check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(1 + times)
        ]
    return {"compile_s": round(said[0], 2), "load_s": round(median(said[1:]), 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS, "gpt-96"], choices=[*NETWORKS, "gpt-96"])
    parser.add_argument("--mixes", type=int, default=10, help="random decisions per network")
    parser.add_argument("--times", type=int, default=11, help="compiled evaluations per case, of which the median")
    parser.add_argument("-o", "--output", default=None, help="write the figures as JSON here")
    arguments = parser.parse_args()
    found = {**facts_of_run(arguments, ("numpy",)), "start_up": start_up(3), "rows": []}
    print(found["start_up"], flush=True)
    assert library(None) is not None
    for network in arguments.networks:
        found["rows"].append(network_row(network, arguments.mixes, arguments.times))
        print(found["rows"][-1], flush=True)
    write_results(arguments.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
