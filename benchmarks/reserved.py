"""Allocated and reserved peaks beside their predictions, on a GPU or on the null GPU (tests/nullgpu).

    NULLGPU_COPIED_BYTES=65536 NULLGPU_RESIDENT_BYTES=15032385536 PYTHONPATH=src .venv-torch-2.14.1/bin/python \
        -m tests.nullgpu python -m benchmarks.reserved -o benchmarks/results/reserved.json

The networks of the GPU suite, each in a process of its own, at three budgets on reserved bytes: 20 steps by default,
and with segments that do not expand. A row has the budget, what was predicted and what the allocator says of all steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, write_results
from benchmarks.gpu_nets import NETS
from benchmarks.pairs import profiled
from poochplan.torch_private.cuda_internals import set_allocator

BUDGETS = ("80%", "65%", "50%")
WHERE = torch.device("cuda", 0)


def rows_of(name: str, steps: int, plan_s: float) -> list[Row]:
    """A profile, a plan for each budget, and steps under it with both kinds of segments."""
    net = NETS[name](WHERE, False)
    profile, found = profiled(net.workload, name), []
    for budget in BUDGETS:
        plan = poochplan.plan(profile, budget, on="reserved", time_limit_s=plan_s, threads=1)
        found += [row(net.workload, plan, steps, expand) | {"net": name, "share": budget} for expand in (True, False)]
    return found


def row(workload: poochplan.Workload, plan: poochplan.Plan, steps: int, expand: bool) -> Row:
    """``expand``: as by default."""
    assert workload.optimizer is not None
    torch.cuda.empty_cache()
    if not expand:
        set_allocator("expandable_segments:False")
    before = torch.cuda.memory_stats(WHERE)["num_ooms"]
    with poochplan.apply(plan, workload.model, on_over_budget="warn", quiet=True) as session:
        for _ in range(steps):
            workload.optimizer.zero_grad(set_to_none=True)
            workload.step().backward()  # type: ignore[no-untyped-call]
            workload.optimizer.step()
        report = session.report()
    set_allocator("")
    assert report.memory is not None
    return {
        "expand": expand,
        "budget_bytes": plan.budget_bytes,
        "overhead": plan.prediction.overhead,
        "predicted_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
        "allocated_bytes": report.memory.allocated_bytes,
        "metered_bytes": report.total.peak_bytes,
        "predicted_reserved_bytes": report.predicted_reserved_bytes,
        "reserved_bytes": report.memory.reserved_bytes,
        "retries": report.memory.retries,
        "out_of_memory": torch.cuda.memory_stats(WHERE)["num_ooms"] - before,
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
    parser.add_argument("--one", help="a network: its rows, as JSON into the output")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/reserved.json"))
    arguments = parser.parse_args()
    if arguments.one:
        arguments.output.write_text(json.dumps(rows_of(arguments.one, arguments.steps, arguments.plan_seconds)))
        return
    results: Row = {**facts_of_run(arguments), "rows": []}
    for name in arguments.nets:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks.reserved", "--one", name, "-o", str(path)]
            command += ["--steps", str(arguments.steps), "--plan-seconds", str(arguments.plan_seconds)]
            subprocess.run(command, check=True)
            results["rows"] += json.loads(path.read_text())
        for one in results["rows"]:
            if one["net"] == name:
                print(line(one), flush=True)
        write_results(arguments.output, results)


if __name__ == "__main__":
    main()
