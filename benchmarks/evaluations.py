"""Seconds of one evaluation: decisions scheduled and simulated in plain Python, and by the compiled evaluator.

    python -m benchmarks.evaluations [--networks gpt-96] -o benchmarks/results/evaluations.json

For each network decisions are drawn at random, and swap-all is among them. Each is evaluated in all four styles within
two budgets, plain and compiled right after each other, and both must give the same. ``first_ms`` are evaluations of
decisions whose replays the evaluator has not met; ``simulate_ms`` and ``fit_ms`` are a simulation and a scheduling of
the plan of policy ``greedy`` at 30% in plain Python. Compiling and loading are those of processes of their own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.facts import Row, parser_of, taken
from benchmarks.pairs import ratio_of_pairs
from benchmarks.planning import NETWORKS, instance
from benchmarks.plans import budget_of
from poochplan.formats.plan import Decision
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator, codes_of, library
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import simulate, swap_all, try_style

KEPT, OF_GREEDY = (0.5, 0.2), 0.3
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


def network_row(network: str, count: int, times: int) -> Row:
    """One network at its slowest link."""
    given = PolicyInput.of(instance(network, "pcie5" if network == "gpt-96" else "pcie3"), 0)
    problem = given.problem
    evaluator = Evaluator(problem)
    pairs: dict[str, list[tuple[float, float]]] = {"mix": [], "swap-all": []}
    first_s = []
    for number, wish in enumerate(mixes(problem, count)):
        codes = codes_of(wish).tobytes()
        for kept in KEPT:
            budget_bytes = budget_of(given.profile, kept)
            for style, named in enumerate(STYLE_OF):
                once_s, found = timed(partial(try_style, problem, "x", wish, budget_bytes, named, recorded=False))
                compiled = partial(evaluator.evaluate_codes, codes, budget_bytes, style)
                first, _ = timed(compiled)
                again_s, fast = timed(compiled, times)
                moved_bytes = found.simulation.out_bytes + found.simulation.in_bytes
                assert fast[:3] == (found.simulation.step_s, found.peak_bytes, moved_bytes)
                pairs["mix" if number else "swap-all"].append((once_s, again_s))
                if number and kept == KEPT[0] and not style:
                    first_s.append(first)
    row: Row = {"network": network, "values": problem.value_count, "ticks": problem.tick_count}
    for name, some in pairs.items():
        ratio = ratio_of_pairs(some)
        plain_ms, compiled_ms = (1e3 * median(each) for each in zip(*some, strict=True))
        row[name] = {"plain_ms": round(plain_ms, 3), "compiled_ms": round(compiled_ms, 4)}
        row[name] |= {"plain_per_s": round(1e3 / plain_ms), "compiled_per_s": round(1e3 / compiled_ms)}
        row[name] |= {"slowest_compiled_ms": round(1e3 * max(each for _, each in some), 4)}
        row[name] |= {key: ratio[key] for key in ("median_ratio", "interval_95")}
    budget_bytes = budget_of(given.profile, OF_GREEDY)
    chosen = run_policy("greedy", PolicyInput(given.profile, problem, budget_bytes))
    simulate_s, _ = timed(lambda: simulate(problem, chosen.schedule), times)
    fit_s, _ = timed(lambda: fit(problem, chosen.wish, budget_bytes, recorded=False), times)
    return {**row, "first_ms": 1e3 * median(first_s), "simulate_ms": 1e3 * simulate_s, "fit_ms": 1e3 * fit_s}


def start_up(times: int) -> dict[str, float]:
    """Seconds until the first evaluation is ready: compiled into an empty cache, and loaded from it."""
    command = [sys.executable, "-c", START_UP]
    with tempfile.TemporaryDirectory() as cache:
        given: Row = {"env": {**os.environ, "XDG_CACHE_HOME": cache}, "check": True, "stdout": subprocess.PIPE}
        said = [float(subprocess.run(command, **given).stdout) for _ in range(1 + times)]
    return {"compile_s": round(said[0], 2), "load_s": round(median(said[1:]), 3)}


def main() -> None:
    every = [*NETWORKS, "gpt-96"]
    parser = parser_of(
        __doc__, networks=every, mixes=(10, "random decisions per network"), times=(11, "compiled evaluations per case")
    )
    asked = parser.parse_args()
    started = start_up(3)
    print(started, flush=True)
    assert library(None) is not None
    taken(asked, asked.networks, lambda name: network_row(name, asked.mixes, asked.times), start_up=started)


if __name__ == "__main__":
    main()
