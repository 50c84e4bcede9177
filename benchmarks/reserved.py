"""Allocated and reserved peaks beside their predictions, on a GPU or on the null GPU (tests/nullgpu).

    NULLGPU_COPIED_BYTES=65536 NULLGPU_RESIDENT_BYTES=15032385536 PYTHONPATH=src .venv-torch-2.14.1/bin/python \
        -m tests.nullgpu python -m benchmarks.reserved -o benchmarks/results/reserved.json

The networks of the GPU suite at three budgets on reserved bytes: 20 steps by default, and with segments that do not
expand. Profile and runs are processes of their own: where the state lies changes what is reserved. A row has
the budget, what was predicted and what the allocator says of all steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, write_results
from benchmarks.gpu_nets import NETS
from benchmarks.pairs import profiled
from poochplan.torch_private.cuda_internals import set_allocator

BUDGETS = ("80%", "65%", "50%")
WHERE = torch.device("cuda", 0)


def make_plans(name: str, folder: Path, plan_s: float) -> None:
    """A profile, and a plan for each budget."""
    profile = profiled(NETS[name](WHERE, False).workload, name)
    for budget in BUDGETS:
        poochplan.plan(profile, budget, on="reserved", time_limit_s=plan_s, threads=1).save(folder / f"{budget}.json")


def run(name: str, folder: Path, budget: str, expand: bool, steps: int) -> Row:
    """Steps under the plan. ``expand``: as by default."""
    if not expand:
        set_allocator("expandable_segments:False")
    workload, plan = NETS[name](WHERE, False).workload, poochplan.Plan.load(folder / f"{budget}.json")
    assert workload.optimizer is not None
    with poochplan.apply(plan, workload.model, on_over_budget="warn", quiet=True) as session:
        for _ in range(steps):
            workload.optimizer.zero_grad(set_to_none=True)
            workload.step().backward()  # type: ignore[no-untyped-call]
            workload.optimizer.step()
        report = session.report()
    assert report.memory is not None
    return {
        "net": name,
        "share": budget,
        "expand": expand,
        "budget_bytes": plan.budget_bytes,
        "overhead": plan.prediction.overhead,
        "predicted_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
        "allocated_bytes": report.memory.allocated_bytes,
        "metered_bytes": report.total.peak_bytes,
        "predicted_reserved_bytes": report.predicted_reserved_bytes,
        "reserved_bytes": report.memory.reserved_bytes,
        "retries": report.memory.retries,
        "out_of_memory": torch.cuda.memory_stats(WHERE)["num_ooms"],
        "notes": [note for note in plan.notes if "reserved" in note],
    }


def line(found: Row) -> str:
    gib = {name: size / 2**30 for name, size in found.items() if name.endswith("_bytes")}
    return (
        f"| {found['net']} | {found['share']} {gib['budget_bytes']:.2f} | {'expand' if found['expand'] else 'fixed'} | "
        f"{gib['predicted_bytes']:.3f} / {gib['allocated_bytes']:.3f} | {gib['predicted_reserved_bytes']:.2f} / "
        f"{gib['reserved_bytes']:.2f} | {found['retries']}, {found['out_of_memory']} | {found['overhead']:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan-seconds", type=float, default=8.0)
    parser.add_argument("--part", nargs="+", help="network, folder and, of a run, budget and 1 if segments expand")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/reserved.json"))
    arguments = parser.parse_args()
    if arguments.part:
        name, folder, *of_run = arguments.part
        if of_run:
            found = run(name, Path(folder), of_run[0], of_run[1] == "1", arguments.steps)
            (Path(folder) / "row.json").write_text(json.dumps(found))
        else:
            make_plans(name, Path(folder), arguments.plan_seconds)
        return
    results: Row = {**facts_of_run(arguments), "rows": []}
    common = [sys.executable, "-m", "benchmarks.reserved", "--steps", str(arguments.steps)]
    common += ["--plan-seconds", str(arguments.plan_seconds), "--part"]
    for name in arguments.nets:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*common, name, folder], check=True)
            for budget, expand in product(BUDGETS, "10"):
                subprocess.run([*common, name, folder, budget, expand], check=True)
                results["rows"].append(json.loads((Path(folder) / "row.json").read_text()))
                print(line(results["rows"][-1]), flush=True)
                write_results(arguments.output, results)


if __name__ == "__main__":
    main()
