"""Resident memory of whole processes: the same training in-core and under a plan, each in a process of its own.

``ru_maxrss`` after three optimizer steps, less what it was after the imports: each process is forked from one that has
done nothing but import. The in-core process does not use the package at all beyond loading the workload; glibc's
allocator is left as it is.

    python -m benchmarks.resident [--workload gpt2] [--budget smallest] [--set batch_size=8] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.facts import write_results

HERE = Path(__file__).parent
STEPS = 3
IMPORTED = ("torch", "torch._dynamo", "monai.networks.nets", "transformers", "poochplan.workload")
"""All that building a workload and training it may import."""


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth_bytes(target: str, settings: dict[str, str], plan_file: Path | None = None) -> int:
    """Trains for three steps; the growth of the largest resident set since the imports, in bytes."""
    import torch

    import poochplan
    from poochplan.workload import load_workload

    plan = poochplan.Plan.load(plan_file) if plan_file else None
    baseline = max_resident_bytes()
    torch.manual_seed(0)
    workload = load_workload(target, settings).workload
    assert workload.optimizer is not None

    def train() -> None:
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            loss = workload.step()
            loss.backward()
            workload.optimizer.step()

    if plan is None:
        train()
    else:
        with poochplan.apply(plan, workload.model, meter="never"):
            train()
    return max_resident_bytes() - baseline


def make_plan(target: str, settings: dict[str, str], budget: str, path: Path) -> dict[str, float]:
    import torch

    import poochplan
    from poochplan.planner.planning import smallest_budget
    from poochplan.workload import load_workload

    torch.manual_seed(0)
    workload = load_workload(target, settings).workload
    profile = poochplan.profile(workload.step, model=workload.model, optimizer=workload.optimizer, iterations=1)
    wanted = smallest_budget(profile) if budget == "smallest" else budget
    plan = poochplan.plan(profile, wanted, evaluations=200)  # resident memory is asked for, not the fastest step
    plan.save(path, force=True)
    return {"in_core_peak_bytes": profile.in_core_peak_bytes, "predicted_peak_bytes": plan.prediction.peak_bytes}


def measure(target: str, settings: dict[str, str], budget: str) -> dict[str, float]:
    """Growth of the resident set of both processes, and the saving."""
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        facts = in_a_process(make_plan, target, settings, budget, plan_file)
        in_core = in_a_process(growth_bytes, target, settings)
        planned = in_a_process(growth_bytes, target, settings, plan_file)
    return {**facts, "in_core_rss_bytes": in_core, "planned_rss_bytes": planned, "saving": 1 - planned / in_core}


def in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """What it returns, in a process that is forked for it and ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        return process.submit(function, *arguments).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt2", help="name of a file in configs/, or any WORKLOAD")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--budget", default="smallest")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    config = HERE.parent / "configs" / f"{arguments.workload}.toml"
    target = str(config) if config.exists() else arguments.workload
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    found = {"workload": arguments.workload, **settings, **measure(target, settings, arguments.budget)}
    print(json.dumps(found, indent=1))
    write_results(arguments.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
