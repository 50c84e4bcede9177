"""Does a profile tell the truth: twelve third-party models, their peak, their step time, and ``fake`` against ``run``.

* peak: the in-core peak of the profile against the same step under ``tests/live_bytes.py``, a meter that shares no code
  with the package.
* times: plain steps in pairs, one of each pair (in turn) to reconcile the ops' durations with, the other to judge them
  by: the reconciled durations' sum against the judging half's median, with the 95% bootstrap interval over the pairs.
  One half's median over the other's, the steps alone, is what the machine does.
* fake: the profile of a step without memory, each distinct op timed by itself and nothing remembered, against that of
  the real step: save and use points, handles, sizes and lifetimes of saved values, peak, and the durations' sum.
  Lifetimes are compared in points passed, since the two need not dispatch the same ops; those that differ are listed.

Each model runs in a process of its own.

    python -m benchmarks.accuracy [--models gpt2,vit] [-o benchmarks/results/accuracy.json]
    python -m benchmarks.accuracy --table benchmarks/results/accuracy.json
"""

from __future__ import annotations

import os
import sys
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.facts import MIB, PACKAGES, Row, parser_of, rows_in, table_row, taken
from benchmarks.models import MODELS, build
from benchmarks.pairs import RESAMPLES, one_step, profiled
from benchmarks.processes import in_a_process
from poochplan.formats.profile import Phase, PointKind, Profile, preset_link
from poochplan.profiler.assembly.reconcile import PhaseSeconds, reconcile
from poochplan.profiler.live.step_function import StepFunction
from poochplan.tensors.host_memory import freed_memory_given_back
from poochplan.workload import Workload
from tests.live_bytes import LiveBytes  # a meter of the tests, on purpose none of the package

LINK = preset_link("pcie4")
"""Nothing is copied here, so that no link has to be measured."""


def metered_peak_bytes(workload: Workload) -> int:
    state = workload.optimizer.state if workload.optimizer is not None else {}
    there = [value for entries in state.values() for value in entries.values() if isinstance(value, torch.Tensor)]
    with LiveBytes(*workload.model.parameters(), *workload.model.buffers(), *there) as meter:
        one_step(workload)
    return meter.peak


def profile_of(workload: Workload, name: str, mode: str) -> Profile:
    return profiled(workload, name, mode=mode, iterations=7 if mode == "run" else None, link=LINK)


def peaks(workload: Workload, profile: Profile) -> Row:
    metered = metered_peak_bytes(workload)
    return {
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "metered_peak_bytes": metered,
        "peak_within": abs(profile.in_core_peak_bytes - metered) <= metered / 100 + MIB,
        "static_bytes": profile.static_bytes,
    }


def times(workload: Workload, profile: Profile, pairs: int) -> Row:
    """The durations reconciled with one half of plain steps, against the other half."""
    step = StepFunction(workload.step, workload.model, workload.optimizer, torch.device("cpu"))
    steps = [step.timed() for _ in range(2 + 2 * pairs)][2:]
    pairs_of_steps = [steps[i : i + 2] if i % 4 else steps[i : i + 2][::-1] for i in range(0, len(steps), 2)]
    found = _ratios(profile, pairs_of_steps)
    drawn = np.random.default_rng(0).integers(0, pairs, (RESAMPLES // 10, pairs))
    resampled = [_ratios(profile, [pairs_of_steps[i] for i in chosen]) for chosen in drawn]
    interval = {key: np.percentile([one[key] for one in resampled], [2.5, 97.5]).round(4).tolist() for key in found}
    return {
        "pairs": pairs,
        "reconciled_over_other_half": round(found["reconciled"], 4),
        "interval_95": interval["reconciled"],
        "plain_over_plain": round(found["plain"], 4),
        "plain_interval_95": interval["plain"],
        "profile_step_s": round(profile.times.step_s, 4),
        "plain_step_s": round(float(np.median([sum(step.values()) for step in steps])), 4),
        "scales": {str(phase): round(getattr(profile.times, f"{phase}_scale"), 4) for phase in Phase},
        "times_within": abs(found["reconciled"] - 1) <= 0.05,
    }


def _ratios(profile: Profile, pairs: list[list[PhaseSeconds]]) -> dict[str, float]:
    """Of the reconciled durations' sum, and of the fitted half's median step, over the judging half's median step."""
    phases, layers = [op.phase for op in profile.ops], [op.layer for op in profile.ops]
    durations_s = np.array([[op.duration_s for op in profile.ops]])
    reconciled = reconcile(phases, layers, durations_s, [first for first, _ in pairs])
    fitted, judging = (float(np.median([sum(pair[half].values()) for pair in pairs])) for half in (0, 1))
    return {"reconciled": sum(reconciled.durations_s) / judging, "plain": fitted / judging}


def against_fake(run: Profile, fake: Profile) -> Row:
    run_ops, fake_ops = (Counter(f"{op.phase} {op.name}" for op in profile.ops) for profile in (run, fake))
    run_s, fake_s = (sum(op.duration_s for op in profile.ops) for profile in (run, fake))
    peak_ratio = fake.in_core_peak_bytes / run.in_core_peak_bytes
    return {
        "points": len(run.points),
        "same_points": list(_points(run)) == list(_points(fake)),
        "same_values": list(_saved(run)) == list(_saved(fake)),
        "same_ops_fingerprint": run.ops_fingerprint == fake.ops_fingerprint,
        "ops_only_in_run": dict(run_ops - fake_ops),
        "ops_only_in_fake": dict(fake_ops - run_ops),
        "fake_peak_over_run": round(peak_ratio, 5),
        "fake_peak_within": abs(peak_ratio - 1) <= 0.02,
        "fake_time_over_run": round(fake_s / run_s, 4),
        "fake_by_phase": {str(phase): round(_phase_s(fake, phase) / _phase_s(run, phase), 4) for phase in Phase},
        "fake_time_within": abs(fake_s / run_s - 1) <= 0.25,
        "fake_notes": list(fake.notes),
    }


def _phase_s(profile: Profile, phase: Phase) -> float:
    return sum(op.duration_s for op in profile.ops if op.phase is phase)


def _points(profile: Profile) -> Iterator[tuple[Any, ...]]:
    """Save and use points in order; handles are numbered in pack order, values in the order of first packs."""
    order = {value: index for index, value in enumerate(_saves(profile))}
    for point in profile.points:
        handle = profile.handles[point.handle]
        yield str(point.kind), point.handle, order[handle.value], handle.layer, handle.dtype, handle.shape


def _saves(profile: Profile) -> list[int]:
    saves = (profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE)
    return list(dict.fromkeys(saves))


def _saved(profile: Profile) -> Iterator[tuple[Any, ...]]:
    """Size and lifetime of each saved value; a tick as the number of points passed."""
    ticks = profile.point_ticks
    for number in _saves(profile):
        value = profile.values[number]
        passed = [bisect_left(ticks, tick + 1) for tick in (value.forward_death, value.freed)]
        yield value.size_bytes, value.dtype, value.shape, *passed


@freed_memory_given_back()  # as in a session: fresh memory costs the same in all steps
def row_of(name: str, pairs: int, threads: int) -> Row:
    torch.set_num_threads(threads)
    workload = build(name)
    run = profile_of(workload, name, "run")
    with tempfile.TemporaryDirectory() as nothing_remembered:
        os.environ["XDG_CACHE_HOME"] = nothing_remembered
        fake = profile_of(workload, name, "fake")
    row = {"model": name} | times(workload, run, pairs) | against_fake(run, fake)
    return row | peaks(workload, run)


def line_of(row: Row) -> str:
    differing = (sum(row[f"ops_only_in_{kind}"].values()) for kind in ("run", "fake"))
    return table_row(
        row["model"],
        f"{row['in_core_peak_bytes'] / MIB:.2f} / {row['metered_peak_bytes'] / MIB:.2f}",
        "{:.3f} ({:.3f} to {:.3f})".format(row["reconciled_over_other_half"], *row["interval_95"]),
        "{:.3f} ({:.3f} to {:.3f})".format(row["plain_over_plain"], *row["plain_interval_95"]),
        f"{'yes' if row['same_points'] and row['same_values'] else 'no'} ({row['points']})",
        "{} / {}".format(*differing),
        f"{row['fake_peak_over_run']:.4f}",
        f"{row['fake_time_over_run']:.2f}",
    )


CLAIMS = ("peak_within", "times_within", "same_points", "same_values", "fake_peak_within", "fake_time_within")


def main() -> int:
    parser = parser_of(__doc__, models=",".join(MODELS), pairs=20, threads=1)
    parser.add_argument("--table", metavar="FILE", help="print the table of a results file and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(*map(line_of, rows_in(arguments.table)), sep="\n")
        return 0

    def row_apart(name: str) -> Row:
        return dict(in_a_process(row_of, name, arguments.pairs, arguments.threads, start="spawn"))

    packages = (*PACKAGES, "transformers", "monai")
    rows = taken(arguments, arguments.models.split(","), row_apart, line_of, packages)
    for claim in CLAIMS:
        missed = ", ".join(row["model"] for row in rows if not row[claim])
        print(f"{claim}: {sum(bool(row[claim]) for row in rows)} of {len(rows)}", f"(not {missed})" if missed else "")
    return 0 if all(row[claim] for row in rows for claim in CLAIMS) else 1


if __name__ == "__main__":
    sys.exit(main())
