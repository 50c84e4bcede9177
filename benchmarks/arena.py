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
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

import poochplan
from benchmarks.facts import MIB, Row, parser_of, taken
from benchmarks.measured_steps import MeasuredSteps, arena_bytes
from benchmarks.pairs import load, profiled
from benchmarks.plans import budget_of, predicted
from benchmarks.processes import answer_of
from poochplan.formats.plan import Plan
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

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
COMPARED = (("on", "off"), ("on", "huge"), ("keep", "plain"), ("on", "plain"), ("off", "plain"))
KEPT = 0.6
"""Of what decisions can move: the budget is the smallest possible one and so much of the way to the in-core peak."""


def fresh(name: str) -> Workload:
    """The workload, built anew from the same seed."""
    if name != "small-unet":
        return load(name, WORKLOADS[name])
    torch.manual_seed(0)
    return small_unet()


def small_unet() -> Workload:
    """A network whose convolutions take more inside than all that is live."""
    from monai.networks.nets.unet import UNet

    model = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)
    batch = torch.randn(1, 1, 64, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda: model(batch).square().mean(), optimizer)


def make(name: str, folder: Path) -> Row:
    """Profiles and plans; the plans go to the folder."""
    profile = profiled(fresh(name), name, iterations=3)
    plan = poochplan.plan(profile, budget_of(profile, KEPT), time_limit_s=20)
    plan.save(folder / "on.json", force=True)
    poochplan.plan(profile, "100%").save(folder / "keep.json", force=True)
    promised = predicted(plan, "arena_bytes", "arena_live_bytes", "arena_peak_bytes")
    return promised | {
        "memory": profile.memory,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_live_peak_bytes": profile.in_core_live_peak_bytes,
        "smallest_budget_bytes": poochplan.smallest_budget(profile),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "predicted_overhead": plan.prediction.overhead,
    }


def run(name: str, mode: str, folder: Path, steps: int) -> Row:
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
    if (served := report.arena) is not None:
        names = ("larger_bytes", "served", "served_bytes", "unplanned_bytes", "taken_bytes")
        found |= {"arena_bytes": served.size_bytes} | {name: getattr(served, name) for name in names}
        found["not_served"] = [[one.size_bytes, one.layer, one.why] for one in served.unserved]
    return found


def in_modes(modes: Sequence[str], pairs: int, run_of: Callable[[str], Row]) -> dict[str, list[Row]]:
    """Rows of each mode. The modes take turns, in alternating order."""
    rows: dict[str, list[Row]] = {mode: [] for mode in modes}
    for turn in range(pairs):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            rows[mode].append(run_of(mode))
    return rows


def ratios(rows: dict[str, list[Row]], mode: str, against: str, what: str = "step_s") -> dict[str, float]:
    """Of the seconds of neighbours: the median, the least and the most."""
    pairs = [a[what] / b[what] for a, b in zip(rows[mode], rows[against], strict=True)]
    return {"median": median(pairs), "least": min(pairs), "most": max(pairs)}


def told_of_modes(rows: dict[str, list[Row]]) -> Row:
    """Whether the bits of all runs are the same, and each mode's run of middle length."""
    middle = {mode: sorted(some, key=lambda row: row["step_s"])[len(some) // 2] for mode, some in rows.items()}
    return {"bitwise": len({row["digest"] for some in rows.values() for row in some}) == 1, "modes": middle}


def one(name: str, pairs: int, steps: int) -> Row:
    """All that is told of a workload."""
    with tempfile.TemporaryDirectory() as scratch:

        def child(mode: str) -> Row:
            environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if mode == "huge" else {}
            return answer_of("benchmarks.arena", ["--one", name, mode, scratch, "--steps", str(steps)], environment)

        found = {"workload": name} | child("make")
        rows = in_modes(TIMED, pairs, child)
        by_hook = child("bytes")
    found |= {f"{mode}_against_{other}": ratios(rows, mode, other) for mode, other in COMPARED}
    physical_bytes = by_hook["physical_peak_bytes"]
    within = {"physical_peak_bytes": physical_bytes, "within_budget": physical_bytes <= found["budget_bytes"]}
    return found | within | told_of_modes(rows | {"bytes": [by_hook]})


def line(row: Row) -> str:
    """A workload in one line."""
    told = [f"{mode}/{other} {row[f'{mode}_against_{other}']['median']:.3f}" for mode, other in COMPARED]
    served = row["modes"]["on"]
    not_served = len(served.get("not_served", [])) if served.get("arena_bytes") else "NOT USED"
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; {', '.join(told)}; faults a step "
        f"{row['modes']['off']['faults']:.0f} -> {served['faults']:.0f}; physical "
        f"{row['physical_peak_bytes'] / MIB:.0f} of {row['budget_bytes'] / MIB:.0f} MiB; "
        f"not served {not_served}"
    )


def main() -> None:
    parser = parser_of(__doc__, workloads=",".join(WORKLOADS), pairs=3, steps=10)
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        name, mode, folder = asked.one
        print(json.dumps(make(name, Path(folder)) if mode == "make" else run(name, mode, Path(folder), asked.steps)))
        return
    taken(asked, asked.workloads.split(","), lambda name: one(name, asked.pairs, asked.steps), line)


if __name__ == "__main__":
    main()
