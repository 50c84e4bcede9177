"""Gradients bitwise equal, peak within budget, prediction come true: every ready workload at three budgets.

Each workload runs in a process of its own: profile, plan at 80%, 60% and the smallest feasible budget, then three
optimizer steps in-core and under each plan from the same seed. Loss, every gradient and every buffer are compared
bitwise in every step; the peak is metered by ``tests/live_bytes.py``, which shares no code with the package. With
``--meter mem_tracker`` it is torch's MemTracker, whose module hooks keep gradients alive (see README.md).

``--small`` takes the small sizes of the tests, a profile without memory with a roofline's durations, and plans that
count simulations: then every column repeats exactly, and two versions of the code can be compared.

    python -m benchmarks.exactness [--workloads demo,gpt2] [--throttle 500MB/s] [--small] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

import poochplan
from benchmarks.facts import write_results
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.workload import Workload, load_workload
from tests.live_bytes import LiveBytes  # a meter of the tests, on purpose none of the package
from tests.workloads.small import SMALL

HERE = Path(__file__).parent
WORKLOADS = ("resnet50", "gpt2", "bert", "unet3d", "seq2seq", "char_rnn")
STEPS = 3


EVALUATIONS = 200


class EveryByte(MemTracker):
    """Sees also what a session itself allocates."""

    sees_poochplan = True


def fresh(name: str, *, small: bool) -> Workload:
    """The workload, built anew from the same seed."""
    torch.manual_seed(0)
    return load_workload(str(HERE.parent / "configs" / f"{name}.toml"), SMALL[name] if small else {}).workload


def metered_step(workload: Workload, meter: str) -> tuple[list[torch.Tensor], int]:
    """Loss, gradients and buffers of one step, and its peak."""
    assert workload.optimizer is not None
    workload.optimizer.zero_grad(set_to_none=True)
    tracker = EveryByte() if meter == "mem_tracker" else LiveBytes(*_tensors(workload))
    if isinstance(tracker, MemTracker):
        tracker.track_external(workload.model, workload.optimizer)
    with tracker:
        loss = workload.step()
        loss.backward()
        workload.optimizer.step()
        if isinstance(tracker, MemTracker):
            peak = max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
        else:
            peak = tracker.peak
    gradients = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
    return [loss.detach().clone(), *gradients, *(b.clone() for b in workload.model.buffers())], peak


def _tensors(workload: Workload) -> list[torch.Tensor]:
    state = workload.optimizer.state if workload.optimizer is not None else {}
    inner = [value for entries in state.values() for value in entries.values() if isinstance(value, torch.Tensor)]
    return [*workload.model.parameters(), *workload.model.buffers(), *inner]


def run(name: str, plan: Plan | None, meter: str, *, small: bool) -> tuple[list[list[torch.Tensor]], list[int], Any]:
    """The tensors and peaks of each step, and the session's report."""
    workload = fresh(name, small=small)
    torch.manual_seed(1)
    if plan is None:
        steps = [metered_step(workload, meter) for _ in range(STEPS)]
        return [tensors for tensors, _ in steps], [peak for _, peak in steps], None
    with poochplan.apply(plan, workload.model, meter="never", force=small) as session:
        steps = [metered_step(workload, meter) for _ in range(STEPS)]
    return [tensors for tensors, _ in steps], [peak for _, peak in steps], session.report()


def bitwise(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def profile_of(name: str, throttle: str | None, *, small: bool) -> Profile:
    """The profile; of a small one no clock has a part in it."""
    workload = fresh(name, small=small)
    how: dict[str, Any] = {"mode": "fake", "roofline": "v100"} if small else {"iterations": 3, "throttle": throttle}
    model, optimizer = workload.model, workload.optimizer
    return poochplan.profile(workload.step, model=model, optimizer=optimizer, workload=name, **how)


def one(name: str, throttle: str | None, meter: str, *, small: bool) -> list[dict[str, Any]]:
    """The rows of one workload."""
    profile = profile_of(name, throttle, small=small)
    reference, in_core_peaks, _ = run(name, None, meter, small=small)
    rows = []
    for label, budget in (("80%", "80%"), ("60%", "60%"), ("smallest", smallest_budget(profile))):
        if isinstance(budget, str) and profile.in_core_peak_bytes * int(budget[:-1]) / 100 < smallest_budget(profile):
            rows.append({"workload": name, "budget": label, "skipped": "below the smallest feasible budget"})
            continue
        plan = poochplan.plan(profile, budget, evaluations=EVALUATIONS if small else None)
        planned, peaks, report = run(name, plan, meter, small=small)
        decisions = [str(value.decision) for value in plan.values]
        rows.append(
            {
                "workload": name,
                "budget": label,
                "budget_bytes": plan.budget_bytes,
                "share": plan.budget_bytes / profile.in_core_peak_bytes,
                "in_core_peak_bytes": max(in_core_peaks),
                "profile_in_core_peak_bytes": profile.in_core_peak_bytes,
                "decisions": {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")},
                "bitwise": bitwise(reference, planned),
                "peaks": peaks,
                "predicted_first": plan.prediction.first_step_peak_bytes,
                "predicted": plan.prediction.peak_bytes,
                "within_budget": max(peaks) <= plan.budget_bytes,
                "predicted_well": _well(peaks[0], plan.prediction.first_step_peak_bytes)
                and all(_well(peak, plan.prediction.peak_bytes) for peak in peaks[1:]),
                "fallbacks": report.total.fallbacks,
                "fallback_reasons": report.total.fallback_reasons,
                "predicted_overhead": plan.prediction.overhead,
            }
        )
    return rows


def _well(metered: int, predicted: int) -> bool:
    return abs(metered - predicted) <= 0.01 * metered + (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--throttle", default=None, help="hold copies to this rate, such as 500MB/s")
    parser.add_argument("--meter", default="live_bytes", choices=("live_bytes", "mem_tracker"))
    parser.add_argument("--small", action="store_true", help="the tests' sizes, and nothing that a clock decides")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        rows = one(arguments.one, arguments.throttle, arguments.meter, small=arguments.small)
        Path(arguments.output).write_text(json.dumps(rows))
        return 0
    rows = []
    for name in arguments.workloads.split(","):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            alone = [sys.executable, "-m", "benchmarks.exactness", "--one", name]
            command = [*alone, "-o", str(output), "--meter", arguments.meter]
            command += ["--throttle", arguments.throttle] if arguments.throttle else []
            subprocess.run(command + (["--small"] if arguments.small else []), check=True)
            for row in json.loads(output.read_text()):
                rows.append(row)
                print(table_row(row), flush=True)
    write_results(arguments.output, rows)
    failed = [row for row in rows if "skipped" not in row and not _passed(row)]
    print(f"{len(rows) - len(failed)} of {len(rows)} as promised")
    return 1 if failed else 0


def _passed(row: dict[str, Any]) -> bool:
    return bool(row["bitwise"] and row["within_budget"] and row["predicted_well"])


def table_row(row: dict[str, Any]) -> str:
    """One line of the Markdown table in README.md."""
    if "skipped" in row:
        return f"| {row['workload']} | {row['budget']} | {row['skipped']} |"
    decisions = "/".join(str(row["decisions"][kind]) for kind in ("keep", "swap", "recompute"))
    mib = 1 / (1 << 20)
    return (
        f"| {row['workload']} | {row['budget']} ({row['share']:.1%}) | {decisions} "
        f"| {row['in_core_peak_bytes'] * mib:.1f} | {row['budget_bytes'] * mib:.1f} "
        f"| {row['predicted_first'] * mib:.1f} / {row['peaks'][0] * mib:.1f} "
        f"| {row['predicted'] * mib:.1f} / {max(row['peaks'][1:]) * mib:.1f} "
        f"| {'yes' if row['bitwise'] else 'NO'} | {'yes' if row['within_budget'] else 'NO'} "
        f"| {'yes' if row['predicted_well'] else 'NO'} | {row['fallbacks']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
