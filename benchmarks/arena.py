"""Steps served from one arena: seconds, page faults, resident memory and bits, against the same steps as they are.

Every run is a process of its own. The modes of a workload take turns; a ratio is that of the medians of two neighbours:

* plain:  the step in PyTorch, the C library's allocator as it is
* off:    under the plan, memory given back as it is freed (``apply(arena="off")``)
* huge:   the same with huge pages (``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``)
* on:     under the plan, from its arena
* keep:   everything kept, from an arena
* bytes:  as on, not timed: what torch has of the C library, by the tests' own hook, and the arena on top of it

    python -m benchmarks.arena [--workloads gpt2,unet3d] [--pairs 3] [--steps 10] -o benchmarks/results/arena.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.measured_steps import MeasuredSteps, answer_of, arena_bytes
from poochplan.formats.plan import Plan
from poochplan.workload import Workload, load_workload
from tests.allocated_bytes import allocated_bytes

CONFIGS = Path(__file__).parent.parent / "configs"
WORKLOADS: dict[str, dict[str, str]] = {
    "gpt2": {},
    "bert": {},
    "resnet50": {"batch_size": "8"},
    "unet3d": {},
    "seq2seq": {},
    "char_rnn": {},
    "small-unet": {},
}
TIMED = ("plain", "off", "huge", "on", "keep")
KEPT = 0.6
"""Of what decisions can move: the budget is the smallest possible one and so much of the way to the in-core peak."""


def fresh(name: str) -> Workload:
    """The workload, built anew from the same seed."""
    torch.manual_seed(0)
    if name == "small-unet":
        return small_unet()
    return load_workload(str(CONFIGS / f"{name}.toml"), WORKLOADS[name]).workload


def small_unet() -> Workload:
    """A network whose convolutions take more inside than all that is live."""
    from monai.networks.nets.unet import UNet

    model = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)
    batch = torch.randn(1, 1, 64, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda: model(batch).square().mean(), optimizer)


def make(name: str, folder: Path) -> dict[str, Any]:
    """Profiles and plans; the plans go to the folder."""
    workload = fresh(name)
    profile = poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, workload=name, iterations=3
    )
    smallest, most = poochplan.smallest_budget(profile), profile.in_core_peak_bytes
    budget_bytes = int(smallest + KEPT * max(0, most - smallest))
    plan = poochplan.plan(profile, budget_bytes, time_limit_s=20)
    plan.save(folder / "on.json", force=True)
    poochplan.plan(profile, "100%").save(folder / "keep.json", force=True)
    found = plan.prediction
    return {
        "memory": profile.memory,
        "in_core_peak_bytes": most,
        "in_core_live_peak_bytes": profile.in_core_live_peak_bytes,
        "smallest_budget_bytes": smallest,
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": found.peak_bytes,
        "predicted_overhead": found.overhead,
        "arena_bytes": found.arena_bytes,
        "arena_live_bytes": found.arena_live_bytes,
        "arena_peak_bytes": found.arena_peak_bytes,
    }


def run(name: str, mode: str, folder: Path, steps: int) -> dict[str, Any]:
    """Some steps in one mode, from the same start."""
    meter = allocated_bytes() if mode == "bytes" else None
    workload = fresh(name)
    torch.manual_seed(1)
    seen = MeasuredSteps(workload, meter)
    if mode == "plain":
        seen.go(steps)
        return seen.found()
    plan = Plan.load(folder / ("keep.json" if mode == "keep" else "on.json"))
    with poochplan.apply(plan, workload.model, arena="off" if mode in ("off", "huge") else "on") as session:
        seen.arena_bytes = lambda: arena_bytes(session)
        seen.go(steps)
        report = session.report()
    found = seen.found() | {"fallbacks": report.total.fallbacks, "metered_peak_bytes": report.last_step.peak_bytes}
    if report.arena is not None:
        served = report.arena
        found |= {
            "arena_bytes": served.size_bytes,
            "larger_bytes": served.larger_bytes,
            "served": served.served,
            "served_bytes": served.served_bytes,
        }
        found |= {"not_served": [[one.size_bytes, one.layer, one.why] for one in served.unserved]}
        found |= {"unplanned_bytes": served.unplanned_bytes, "taken_bytes": served.taken_bytes}
    return found


def ratios(rows: dict[str, list[dict[str, Any]]], mode: str, against: str) -> dict[str, float]:
    """Of the seconds of neighbours: the median, the least and the most."""
    pairs = [a["step_s"] / b["step_s"] for a, b in zip(rows[mode], rows[against], strict=True)]
    return {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs)}


def one(name: str, pairs: int, steps: int) -> dict[str, Any]:
    """All that is told of a workload."""
    with tempfile.TemporaryDirectory() as scratch:
        found = {"workload": name} | _child(name, "make", scratch, steps)
        rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in TIMED}
        for turn in range(pairs):
            for mode in TIMED if turn % 2 == 0 else TIMED[::-1]:
                rows[mode].append(_child(name, mode, scratch, steps))
        by_hook = _child(name, "bytes", scratch, steps)
    found |= {f"{mode}_against_{other}": ratios(rows, mode, other) for mode, other in COMPARED}
    every = [row for mode in TIMED for row in rows[mode]] + [by_hook]
    physical_bytes = by_hook["physical_peak_bytes"]
    return found | {
        "bitwise": len({row["digest"] for row in every}) == 1,
        "physical_peak_bytes": physical_bytes,
        "within_budget": physical_bytes <= found["budget_bytes"],
        "modes": {mode: _middle(rows[mode]) for mode in TIMED} | {"bytes": by_hook},
    }


COMPARED = (("on", "off"), ("on", "huge"), ("keep", "plain"), ("on", "plain"), ("off", "plain"))


def _middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows, key=lambda row: row["step_s"])[len(rows) // 2]


def _child(name: str, mode: str, folder: str, steps: int) -> dict[str, Any]:
    """What a process of its own says."""
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if mode == "huge" else {}
    return answer_of("benchmarks.arena", ["--one", name, mode, folder, "--steps", str(steps)], environment)


def line(row: dict[str, Any]) -> str:
    """A workload in one line."""
    told = [f"{mode}/{other} {row[f'{mode}_against_{other}']['median']:.3f}" for mode, other in COMPARED]
    served = row["modes"]["on"]
    not_served = len(served.get("not_served", [])) if served.get("arena_bytes") else "NOT USED"
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; {', '.join(told)}; faults a step "
        f"{row['modes']['off']['faults']:.0f} -> {served['faults']:.0f}; physical "
        f"{row['physical_peak_bytes'] / 2**20:.0f} of {row['budget_bytes'] / 2**20:.0f} MiB; "
        f"not served {not_served}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    if arguments.one:
        name, mode, folder = arguments.one
        made = mode == "make"
        print(json.dumps(make(name, Path(folder)) if made else run(name, mode, Path(folder), arguments.steps)))
        return
    rows = []
    for name in arguments.workloads.split(","):
        rows.append(one(name, arguments.pairs, arguments.steps))
        print(line(rows[-1]), flush=True)
        write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})


if __name__ == "__main__":
    main()
