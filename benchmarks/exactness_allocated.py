"""Gradients bitwise equal, allocated bytes within the budget, by an outside meter: every workload at three budgets.

Each workload is profiled once and planned at 80%, 60% and the smallest budget there is: without an arena (the budget is
on allocated bytes) and with one (on the arena and what lies outside it). Every run is a process of its own, forked from
one that has installed the allocator hook of the tests and done nothing else; see ``benchmarks/hooked.py``. Loss,
gradients, buffers, parameters and the generator are compared after each step by digests.

The hook sees all that torch has of the C library: parameters, inputs, what ops take and give back inside, and what the
session takes for itself. The arena counts whole, from the first step that it serves.

    python -m benchmarks.exactness_allocated [--workloads gpt2,bert] [--throttle 400MB/s] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.hooked import Trained, ready_to_fork, train
from benchmarks.resident import in_a_process
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.workload import Workload, load_workload

CONFIGS = Path(__file__).parent.parent / "configs"
WORKLOADS = ("resnet50", "gpt2", "bert", "unet3d", "seq2seq", "char_rnn")
BUDGETS = ("80%", "60%", "smallest")
STEPS = {"off": 3, "on": 6}
"""With an arena two are metered by their ops, and one to three are learned from."""
_MIB = 1 << 20
Arena = Literal["off", "on"]


def fresh(name: str) -> Workload:
    """The workload, built anew from the same seed."""
    torch.manual_seed(0)
    return load_workload(str(CONFIGS / f"{name}.toml"), {}).workload


def make(name: str, throttle: str | None, folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Profiles and plans; a row for each plan, which lies in the folder by its number."""
    workload = fresh(name)
    profile = poochplan.profile(
        workload.step,
        model=workload.model,
        optimizer=workload.optimizer,
        workload=name,
        iterations=2,
        throttle=throttle,
    )
    rows: list[dict[str, Any]] = []
    for arena in STEPS:
        for label in BUDGETS:
            smallest = poochplan.smallest_budget(profile, arena=arena)
            row = {"workload": name, "budget": label, "arena": arena, "memory": str(profile.memory)}
            try:
                plan = poochplan.plan(
                    profile, smallest if label == "smallest" else label, arena=arena, time_limit_s=limit_s
                )
            except InfeasibleError as error:
                row["refused_smallest_bytes"] = error.smallest_budget_bytes
            else:
                plan.save(folder / f"{len(rows)}.json", force=True)
                row |= _promises(plan)
                row["share"] = plan.budget_bytes / profile.in_core_peak_bytes
                row["in_core_predicted"] = profile.in_core_peak_bytes
            rows.append(row)
    return rows


def _promises(plan: Plan) -> dict[str, Any]:
    decisions = [str(value.decision) for value in plan.values]
    return {
        "budget_bytes": plan.budget_bytes,
        "decisions": {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")},
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "predicted_arena_bytes": plan.prediction.arena_bytes,
        "predicted_arena_peak_bytes": plan.prediction.arena_peak_bytes,
        "predicted_overhead": plan.prediction.overhead,
    }


def run(name: str, arena: Arena, plan_file: Path | None) -> Trained:
    """Some steps, in-core where there is no plan."""
    workload = fresh(name)
    assert workload.optimizer is not None
    torch.manual_seed(1)
    given = workload.model, workload.step, workload.optimizer
    if plan_file is None:
        return train(*given, max(STEPS.values()))
    with poochplan.apply(Plan.load(plan_file), workload.model, arena=arena) as session:
        return train(*given, STEPS[arena], session)


def rows_of(name: str, throttle: str | None, limit_s: float) -> list[dict[str, Any]]:
    """The rows of one workload."""
    with tempfile.TemporaryDirectory() as scratch:
        rows: list[dict[str, Any]] = in_a_process(make, name, throttle, Path(scratch), limit_s)
        reference: Trained = in_a_process(run, name, "off", None)
        for number, row in enumerate(rows):
            if "refused_smallest_bytes" in row:
                continue
            planned: Trained = in_a_process(run, name, row["arena"], Path(scratch) / f"{number}.json")
            expected = reference.digests[: len(planned.digests)]
            row |= planned.facts() | {"in_core_peak_bytes": max(reference.peaks)}
            row |= {"bitwise": planned.digests == expected, "within_budget": max(planned.peaks) <= row["budget_bytes"]}
            print(table_row(row), flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    """Whether a row is as promised; an arena that was not used is not."""
    if "refused_smallest_bytes" in row:
        return True
    served = row["arena"] == "off" or (row["arena_bytes"] > 0 and not row["large_once_learned"])
    return bool(row["bitwise"] and row["within_budget"] and served and not row["fallbacks"])


def table_row(row: dict[str, Any]) -> str:
    """One line of the Markdown table in README.md."""
    if "refused_smallest_bytes" in row:
        return f"| {row['workload']} | {row['arena']} | {row['budget']}: refused, {row['refused_smallest_bytes']} |"
    with_arena = row["arena"] == "on"
    predicted = row["predicted_arena_peak_bytes" if with_arena else "predicted_peak_bytes"]
    told = (
        f"{row['arena_bytes'] / _MIB:.1f} | {row['served_bytes'] / _MIB:.0f} | {row['large_once_learned']}"
        if with_arena
        else "- | - | -"
    )
    return (
        f"| {row['workload']} | {row['arena']} | {row['budget']} ({row['share']:.1%}) "
        f"| {'/'.join(map(str, row['decisions'].values()))} | {row['in_core_peak_bytes'] / _MIB:.1f} "
        f"| {row['budget_bytes'] / _MIB:.1f} | {predicted / _MIB:.1f} / {max(row['peaks']) / _MIB:.1f} "
        f"| {told} | {'yes' if row['bitwise'] else 'NO'} | {'yes' if row['within_budget'] else 'NO'} "
        f"| {row['fallbacks']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--throttle", default="400MB/s", help="hold copies to this rate")
    parser.add_argument("--plan-s", type=float, default=3.0, help="seconds for each plan")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    ready_to_fork()
    rows: list[dict[str, Any]] = []
    facts = facts_of_run(arguments)  # of the code that is loaded now
    for name in arguments.workloads.split(","):
        rows += rows_of(name, arguments.throttle, arguments.plan_s)
        write_results(arguments.output, facts | {"rows": rows})
    good = sum(map(passed, rows))
    print(f"{good} of {len(rows)} as promised")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
