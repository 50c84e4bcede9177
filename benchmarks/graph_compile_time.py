"""What compiling with a plan takes, beside compiling alone: with empty caches of the compiler, and from full ones.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_compile_time -o benchmarks/results/graph_compile_time.json

Each figure is a process of its own, from the model to the end of its second step (some networks are compiled twice, as
their first step writes into their configuration). *Cold* ratios are those of ``poochplan.compile`` with a budget to
``torch.compile``, each with an empty cache; *warm* ones those of ``poochplan.compile`` with the plan that was found to
``torch.compile``, each with the cache that the cold one has filled. Links are held to 400 MB/s. Seconds are told on the
wall and of the processor, with child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results
from benchmarks.graph_mode import THROTTLE
from benchmarks.measured_steps import answer_of

NETWORKS = ("gpt2", "bert", "vit")
BUDGET = "60%"
PLAN = "plan.json"


def compiled(name: str, how: str, folder: Path) -> dict[str, Any]:
    """Seconds that one process takes."""
    import torch
    import torch._inductor.compile_fx  # what it takes to load is no part of it

    import poochplan
    from benchmarks.against.compared_networks import fresh
    from benchmarks.pairs import one_step
    from poochplan.torch_private.compiler_internals import compile_module

    torch.set_num_threads(1)
    work, parts = fresh(name), _Parts()
    if how == "stock":
        compile_module(work.model, dynamic=False)
        one_step(work)
        one_step(work)
        return parts.told()
    if how == "planned":
        session = poochplan.compile(
            work.model,
            work.step,
            optimizer=work.optimizer,
            budget=BUDGET,
            throttle=THROTTLE,
            progress=parts.begin,
        )
        session.plan.save(folder / PLAN)
    else:
        session = poochplan.compile(work.model, plan=poochplan.Plan.load(folder / PLAN))
    parts.begin("two steps")
    with session:
        one_step(work)
        one_step(work)
    return parts.told()


class _Parts:
    """Seconds of what is done one after the other. State: when the last one began."""

    def __init__(self) -> None:
        self._began = self._last = _now()
        self._what = "begin"
        self._wall_s: dict[str, float] = {}

    def begin(self, what: str) -> None:
        now = _now()
        self._wall_s[self._what] = round(self._wall_s.get(self._what, 0.0) + now[0] - self._last[0], 2)
        self._last, self._what = now, what

    def told(self) -> dict[str, Any]:
        self.begin("end")
        (wall_s, cpu_s), (began_s, began_cpu_s) = self._last, self._began
        return {"wall_s": round(wall_s - began_s, 2), "cpu_s": round(cpu_s - began_cpu_s, 2), "parts": self._wall_s}


def _now() -> tuple[float, float]:
    return time.perf_counter(), sum(os.times()[:4])


def row(name: str, repeats: int) -> dict[str, Any]:
    """All of one network."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as ours:
            for key, how, folder in (
                ("stock_cold", "stock", plain),
                ("planned_cold", "planned", ours),
                ("stock_warm", "stock", plain),
                ("planned_warm", "from-plan", ours),
            ):
                answer = answer_of(
                    "benchmarks.graph_compile_time", ["--one", name, how, folder], {"TORCHINDUCTOR_CACHE_DIR": folder}
                )
                found.setdefault(key, []).append(answer)
    ratios = {
        f"{state}_{clock}": [
            round(ours[f"{clock}_s"] / plain[f"{clock}_s"], 3)
            for ours, plain in zip(found[f"planned_{state}"], found[f"stock_{state}"], strict=True)
        ]
        for state in ("cold", "warm")
        for clock in ("wall", "cpu")
    }
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    return {"network": name, "budget": BUDGET, "median_ratios": medians, "ratios": ratios, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "HOW", "FOLDER"), help="this one alone, in this process")
    given = parser.parse_args()
    if given.one:
        name, how, folder = given.one
        print(json.dumps(compiled(name, how, Path(folder))))
        return
    rows = []
    for name in given.networks:
        rows.append(row(name, given.repeats))
        print(json.dumps(rows[-1]["median_ratios"] | {"network": name}), flush=True)
        write_results(given.output, facts_of_run(given) | {"throttle": THROTTLE, "rows": rows})


if __name__ == "__main__":
    main()
