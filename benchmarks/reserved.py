"""Allocated and reserved peaks beside their predictions, on a GPU or on the null GPU (tests/nullgpu).

    NULLGPU_COPIED_BYTES=65536 NULLGPU_SECONDS=0 NULLGPU_RESIDENT_BYTES=15032385536 PYTHONPATH=src \
        .venv-torch-2.14.1/bin/python -m tests.nullgpu python -m benchmarks.reserved --cap 256MiB

The networks of the GPU suite at three budgets: 20 steps by default settings, with segments that do not expand, and,
with ``--cap``, by default with that much more than the budget as the allocator's limit. ``smallest`` is the smallest
budget that has a plan by live bytes, and takes the place of a smaller share. Where no plan reserves so little, the plan
says so and has the fewest reserved bytes of those looked at. Profile and runs are processes of their own: where the
state lies changes what is reserved. A row has the budget, what was predicted and what the allocator says of all steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, write_results
from benchmarks.gpu_nets import NETS
from benchmarks.pairs import profiled
from poochplan.planner.arena.reserved import budget_bytes_of
from poochplan.planner.planning import smallest_budget
from poochplan.torch_private.cuda_internals import set_allocator
from poochplan.units import parse_bytes

BUDGETS = ("80%", "60%", "smallest")
WHERE = torch.device("cuda", 0)
EXPANDING, FIXED, CAPPED = "expanding", "fixed", "capped"


def make_plans(name: str, folder: Path, options: dict[str, Any]) -> None:
    """A profile, and a plan for each budget and kind of segments, which a profile has as the allocator is set."""
    profile = profiled(NETS[name](WHERE, False).workload, name)
    for budget, way in product(BUDGETS, (EXPANDING, FIXED)):
        device = msgspec.structs.replace(profile.device, expands=way == EXPANDING)
        like = msgspec.structs.replace(profile, device=device)
        least_bytes = smallest_budget(profile)
        named = least_bytes if budget == "smallest" else max(least_bytes, budget_bytes_of(like, budget, None))
        found = poochplan.plan(like, named, threads=1, **options)
        found.save(folder / f"{budget}-{way}.json")


def run(name: str, folder: Path, budget: str, way: str, steps: int, cap_bytes: int) -> None:
    """Steps under the plan, and their row."""
    if way == FIXED:
        set_allocator("expandable_segments:False")
    workload = NETS[name](WHERE, False).workload
    plan = poochplan.Plan.load(folder / f"{budget}-{FIXED if way == FIXED else EXPANDING}.json")
    assert workload.optimizer is not None
    most_bytes = max(plan.budget_bytes, plan.covered_bytes) + cap_bytes if way == CAPPED else None
    done, out_of_memory = 0, ""
    with poochplan.apply(plan, workload.model, on_over_budget="warn", quiet=True, cap_bytes=most_bytes) as session:
        try:
            for _ in range(steps):
                workload.optimizer.zero_grad(set_to_none=True)
                workload.step().backward()  # type: ignore[no-untyped-call]
                workload.optimizer.step()
                done += 1
        except torch.OutOfMemoryError as error:
            out_of_memory = str(error)
        report = session.report()
    assert report.memory is not None
    found = {
        "net": name,
        "share": budget,
        "segments": way,
        "steps": done,
        "on": plan.on,
        "budget_bytes": plan.budget_bytes,
        "overhead": plan.prediction.overhead,
        "predicted_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
        "allocated_bytes": report.memory.allocated_bytes,
        "metered_bytes": report.total.peak_bytes,
        "predicted_reserved_bytes": report.predicted_reserved_bytes,
        "reserved_bytes": report.memory.reserved_bytes,
        "retries": report.memory.retries,
        "out_of_memory": out_of_memory,
        "swapped_bytes": report.last_step.out_bytes,
        "fallbacks": report.total.fallbacks,
        "fallback_reasons": list(report.total.fallback_reasons),
        "notes": [note for note in plan.notes if "reserve" in note],
    }
    (folder / "row.json").write_text(json.dumps(found))


def line(found: Row) -> str:
    gib = {name: size / 2**30 for name, size in found.items() if name.endswith("_bytes")}
    above = found["reserved_bytes"] > found["budget_bytes"]
    told = " (told)" if found["notes"] else " (NOT TOLD)"
    return (
        f"| {found['net']} | {found['share']}: {gib['budget_bytes']:.2f} | {found['segments']} | "
        f"{gib['predicted_bytes']:.3f} / {gib['allocated_bytes']:.3f} | {gib['predicted_reserved_bytes']:.2f} / "
        f"{gib['reserved_bytes']:.2f}{f', above{told}' if above else ''} | {found['retries']}, "
        f"{int(bool(found['out_of_memory']))} | {found['overhead']:+.1%} | {found['steps']}, {found['fallbacks']} |"
    )


def apart(work: Callable[..., None], *given: object) -> None:
    """Does the work in a process of its own, which has everything imported."""
    process = multiprocessing.get_context("fork").Process(target=work, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__}{given}: exit code {process.exitcode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan-seconds", type=float, default=8.0)
    parser.add_argument("--host-budget", help="most bytes swapped out, on a host whose free memory changes")
    parser.add_argument("--cap", default="0", help="also with this limit above the budget, such as 256MiB")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/reserved.json"))
    arguments = parser.parse_args()
    cap_bytes = parse_bytes(arguments.cap, "--cap", least=0)
    ways = (EXPANDING, FIXED, *([CAPPED] if cap_bytes else []))
    options = {"time_limit_s": arguments.plan_seconds, "host_budget": arguments.host_budget}
    results: Row = {**facts_of_run(arguments), "rows": []}
    for name in arguments.nets:
        with tempfile.TemporaryDirectory() as folder:
            apart(make_plans, name, Path(folder), options)
            for budget, way in product(BUDGETS, ways):
                apart(run, name, Path(folder), budget, way, arguments.steps, cap_bytes)
                results["rows"].append(json.loads((Path(folder) / "row.json").read_text()))
                print(line(results["rows"][-1]), flush=True)
                write_results(arguments.output, results)


if __name__ == "__main__":
    main()
