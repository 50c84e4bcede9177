"""Do predictions come true: step time and peak of plans at three budgets, for six third-party models.

The link is held to a known rate, so that what is judged is the profile, the simulator and the runtime, not the disk.
Each model (``models.py``) runs in a process of its own: profiled, planned at three budgets, and under each plan timed
in pairs with in-core steps of the same session (``pairs.py``); plain steps are compared with plain ones once for each
model. The peak of a further step, not timed, is metered by ``tests/live_bytes.py``, which shares no code with the
package.

    python -m benchmarks.prediction [--models t5,swin] [-o benchmarks/results/prediction.json]
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

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.models import build
from benchmarks.pairs import Planned, one_step, profiled
from poochplan.planner.planning import smallest_budget
from poochplan.tensors.malloc import freed_memory_given_back
from poochplan.workload import Workload
from tests.live_bytes import LiveBytes  # a meter of the tests, on purpose none of the package

CHOSEN = ("llama", "t5", "swin", "mobilenet_v2", "whisper", "monai_basicunet")
BUDGETS = (0.75, 0.4, 0.1)
"""Of the bytes between the smallest feasible budget and the in-core peak, the share that is there."""


def budget_of(profile: poochplan.Profile, share: float) -> int:
    """The budget in bytes."""
    smallest = smallest_budget(profile)
    return smallest + int(share * (profile.in_core_peak_bytes - smallest))


def metered_peak_bytes(workload: Workload) -> int:
    """The peak of one step."""
    state = workload.optimizer.state if workload.optimizer is not None else {}
    there = [value for entries in state.values() for value in entries.values() if isinstance(value, torch.Tensor)]
    with LiveBytes(*workload.model.parameters(), *workload.model.buffers(), *there) as meter:
        one_step(workload)
    return meter.peak


def row_of(
    workload: Workload, name: str, share: float, plan: poochplan.Plan, pairs: int, noise_pairs: int
) -> dict[str, Any]:
    """One plan: what it promises, and what was measured."""
    measured = Planned(workload, plan)
    found = measured.measure(pairs, noise_pairs)
    with poochplan.apply(plan, workload.model, meter="never"):
        one_step(workload)
        peak_bytes = metered_peak_bytes(workload)
    decisions = [str(value.decision) for value in plan.values]
    promised, wall = plan.prediction, found["planned_over_plain"]["wall"]
    ratio = 1 + promised.overhead
    return {
        "model": name,
        "budget_share": share,
        "budget_bytes": plan.budget_bytes,
        "decisions": {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")},
        "swapped_bytes": promised.out_bytes,
        "predicted_step_s": round(promised.step_s, 5),
        "of_that_runtime_s": round(promised.runtime_s, 5),
        "predicted_ratio": round(ratio, 5),
        "measured_over_predicted": round(wall["median_ratio"] / ratio, 5),
        "interval_95": [round(bound / ratio, 5) for bound in wall["interval_95"]],
        "predicted_peak_bytes": promised.peak_bytes,
        "metered_peak_bytes": peak_bytes,
        "within_10_percent": abs(wall["median_ratio"] / ratio - 1) <= 0.10,
        "peak_within_1_percent_1_mib": abs(peak_bytes - promised.peak_bytes) <= promised.peak_bytes / 100 + (1 << 20),
        **found,
    }


@freed_memory_given_back()  # as in a session: fresh memory costs the same in all steps
def rows_of(name: str, throttle: str, pairs: int, seconds: float) -> list[dict[str, Any]]:
    """The three plans of one model."""
    workload = build(name)
    profile = profiled(workload, name, throttle=throttle, iterations=7)
    rows = []
    for share in BUDGETS:
        plan = poochplan.plan(profile, budget_of(profile, share), time_limit_s=seconds)
        rows.append(row_of(workload, name, share, plan, pairs, 0 if rows else pairs))
        print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row of the table in README.md."""
    mib = 1 << 20
    low, high = row["interval_95"]
    noise = ""
    if "plain_over_plain" in row:
        wall = row["plain_over_plain"]["wall"]
        noise = f"{wall['median_ratio']:.3f} ({wall['interval_95'][0]:.3f} to {wall['interval_95'][1]:.3f})"
    return (
        f"| {row['model']} | {row['budget_share']:.0%} ({row['budget_bytes'] / mib:.0f} MiB) | "
        f"{'/'.join(str(count) for count in row['decisions'].values())} | {row['predicted_ratio']:.3f} | "
        f"{row['planned_over_plain']['wall']['median_ratio']:.3f} | "
        f"{row['measured_over_predicted']:.3f} ({low:.3f} to {high:.3f}) | "
        f"{noise} | "
        f"{row['predicted_peak_bytes'] / mib:.1f} / {row['metered_peak_bytes'] / mib:.1f} | {row['fallbacks']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CHOSEN))
    parser.add_argument("--throttle", default="400MB/s")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps for each plan (default: 20)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of each plan (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    parser.add_argument("--here", action="store_true", help="in this process: for a single model")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.models.split(",")
    rows: list[dict[str, Any]] = []
    for name in names:
        if arguments.here:
            rows += rows_of(name, arguments.throttle, arguments.pairs, arguments.seconds)
        else:
            rows += in_its_own_process(name, arguments)
    write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})
    good = sum(row["within_10_percent"] and row["peak_within_1_percent_1_mib"] for row in rows)
    if arguments.here:
        return 0
    print(f"{good} of {len(rows)} plans came true: step time within 10%, peak within 1% + 1 MiB")
    return 0 if good == len(rows) else 1


def in_its_own_process(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        words = [
            word
            for key in ("throttle", "pairs", "seconds", "threads")
            for word in (f"--{key}", str(getattr(arguments, key)))
        ]
        here = [sys.executable, "-W", "ignore", "-m", "benchmarks.prediction", "--here"]
        command = [*here, "--models", name, *words, "-o", str(found)]
        subprocess.run(command, check=True)
        rows: list[dict[str, Any]] = json.loads(found.read_text())["rows"]
        return rows


if __name__ == "__main__":
    sys.exit(main())
