r"""Forward passes from one arena: seconds, page faults and bits against the same passes as they are; bytes against what
separate blocks and the caching allocator's model would take.

Every run is a process of its own, with the C library's allocator as it is. The model is in eval, without gradients. The
two modes of a network take turns; a ratio is that of the medians of two neighbours, of seconds by the clock and of
processor seconds, which other work on the machine changes less:

* plain:  the pass in PyTorch
* arena:  the same within ``poochplan.arena(model)``

    python -m benchmarks.inference [--workloads gpt2,unet3d] [--pairs 3] [--passes 10] \
        -o benchmarks/results/inference.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import poochplan
from benchmarks.arena import WORKLOADS, fresh
from benchmarks.facts import facts_of_run, write_results
from poochplan.profiler.pass_profiling import profile_pass

MODES = ("plain", "arena")
SETTLED = 4
"""Passes before those that are timed: one is ordinary, two are written down."""
FIGURES = (
    "calls",
    "live_peak_bytes",
    "allocated_peak_bytes",
    "total_bytes",
    "separate_bytes",
    "arena_bytes",
    "arena_live_bytes",
    "outside_bytes",
    "caching_bytes",
)


def make(name: str) -> dict[str, Any]:
    """The figures of its profile: bytes, which no clock decides."""
    workload = fresh(name)
    profile = profile_pass(workload.step, model=workload.model, workload=name, iterations=1, warmup=1)
    taken_bytes = profile.arena_bytes + profile.outside_bytes
    return {figure: getattr(profile, figure) for figure in FIGURES} | {
        "blocks": len(profile.blocks),
        "static_bytes": sum(profile.static_bytes.values()),
        "taken_bytes": taken_bytes,
        "less_than_separate": 1 - taken_bytes / profile.total_bytes,
        "less_than_caching": 1 - taken_bytes / profile.caching_bytes,
        "above_live": profile.arena_bytes / max(1, profile.arena_live_bytes) - 1,
    }


def run(name: str, mode: str, passes: int) -> dict[str, Any]:
    """Some passes in one mode, from the same start."""
    workload = fresh(name)
    workload.model.eval()
    torch.manual_seed(1)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        arena = stack.enter_context(poochplan.arena(workload.model)) if mode == "arena" else None
        found = _passes(workload.step, passes)
        if arena is not None:
            told = arena.report()
            found |= {"arena_bytes": told.size_bytes, "served": told.served, "served_bytes": told.served_bytes}
            found |= {"not_served": told.unplanned + told.taken, "layouts": told.layouts}
    return found


def _passes(step: Callable[[], torch.Tensor], passes: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    seconds, processor, faults = [], [], []
    for _ in range(passes):
        faults_before, used_s = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        began_s = time.perf_counter()
        loss = float(step())
        seconds.append(time.perf_counter() - began_s)
        processor.append(time.process_time() - used_s)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before)
        digest.update(str(loss).encode())
    return {
        "pass_s": statistics.median(seconds[SETTLED:]),
        "processor_s": statistics.median(processor[SETTLED:]),
        "faults": statistics.median(faults[SETTLED:]),
        "digest": digest.hexdigest()[:16],
    }


def one(name: str, pairs: int, passes: int) -> dict[str, Any]:
    """All that is told of a network."""
    found = {"workload": name} | _child(name, "make", passes)
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for turn in range(pairs):
        for mode in MODES if turn % 2 == 0 else MODES[::-1]:
            rows[mode].append(_child(name, mode, passes))
    return found | {
        "bitwise": len({row["digest"] for mode in MODES for row in rows[mode]}) == 1,
        "arena_against_plain": _ratios(rows, "pass_s"),
        "arena_against_plain_processor": _ratios(rows, "processor_s"),
        "modes": {mode: sorted(rows[mode], key=lambda row: row["pass_s"])[len(rows[mode]) // 2] for mode in MODES},
    }


def _ratios(rows: dict[str, list[dict[str, Any]]], what: str) -> dict[str, float]:
    """Of neighbours: the median, the least and the most."""
    found = [a[what] / b[what] for a, b in zip(rows["arena"], rows["plain"], strict=True)]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def _child(name: str, mode: str, passes: int) -> dict[str, Any]:
    """What a process of its own says."""
    command = [sys.executable, "-m", "benchmarks.inference", "--one", name, mode, "--passes", str(passes)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} {mode}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(row: dict[str, Any]) -> str:
    """A network in one line."""
    served, plain = row["modes"]["arena"], row["modes"]["plain"]
    ratio, processor = row["arena_against_plain"], row["arena_against_plain_processor"]
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; arena/plain {ratio['median']:.3f} "
        f"({ratio['least']:.3f} to {ratio['most']:.3f}), processor "
        f"{processor['median']:.3f}; faults {plain['faults']:.0f} -> {served['faults']:.0f}; "
        f"arena {row['arena_bytes'] / 2**20:.1f} MiB, {row['above_live']:.1%} above live; less than separate "
        f"{row['less_than_separate']:.1%}, than the caching allocator {row['less_than_caching']:.1%}; "
        f"not served {served['not_served']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    if arguments.one:
        name, mode = arguments.one
        print(json.dumps(make(name) if mode == "make" else run(name, mode, arguments.passes)))
        return
    rows = []
    for name in arguments.workloads.split(","):
        rows.append(one(name, arguments.pairs, arguments.passes))
        print(line(rows[-1]), flush=True)
        write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})


if __name__ == "__main__":
    main()
