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
import json

import torch

import poochplan
from benchmarks.arena import WORKLOADS, fresh, in_modes, ratios, told_of_modes
from benchmarks.facts import MIB, Row, parser_of, taken
from benchmarks.measured_steps import MeasuredSteps
from benchmarks.processes import answer_of
from poochplan.profiler.pass_profiling import profile_pass

MODES = ("plain", "arena")
FIGURES = (
    *("calls", "live_peak_bytes", "allocated_peak_bytes", "total_bytes", "separate_bytes", "arena_bytes"),
    *("arena_live_bytes", "outside_bytes", "caching_bytes"),
)


class MeasuredPasses(MeasuredSteps):
    """Forward alone. The first one is ordinary, and two are written down."""

    def _step(self) -> float:
        return float(self._workload.step())


def make(name: str) -> Row:
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


def run(name: str, mode: str, passes: int) -> Row:
    """Some passes in one mode, from the same start."""
    workload = fresh(name)
    workload.model.eval()
    torch.manual_seed(1)
    seen = MeasuredPasses(workload)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        arena = stack.enter_context(poochplan.arena(workload.model)) if mode == "arena" else None
        seen.go(passes)
        if arena is None:
            return seen.found()
        told = arena.report()
    served = {"arena_bytes": told.size_bytes, "served": told.served, "served_bytes": told.served_bytes}
    return seen.found() | served | {"not_served": told.unplanned + told.taken, "layouts": told.layouts}


def one(name: str, pairs: int, passes: int) -> Row:
    """All that is told of a network."""

    def child(mode: str) -> Row:
        return answer_of("benchmarks.inference", ["--one", name, mode, "--passes", str(passes)])

    found = {"workload": name} | child("make")
    rows = in_modes(MODES, pairs, child)
    compared = {"arena_against_plain": "step_s", "arena_against_plain_processor": "processor_s"}
    return found | told_of_modes(rows) | {key: ratios(rows, "arena", "plain", what) for key, what in compared.items()}


def line(row: Row) -> str:
    """A network in one line."""
    served, plain = row["modes"]["arena"], row["modes"]["plain"]
    ratio, processor = row["arena_against_plain"], row["arena_against_plain_processor"]
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; arena/plain {ratio['median']:.3f} "
        f"({ratio['least']:.3f} to {ratio['most']:.3f}), processor "
        f"{processor['median']:.3f}; faults {plain['faults']:.0f} -> {served['faults']:.0f}; "
        f"arena {row['arena_bytes'] / MIB:.1f} MiB, {row['above_live']:.1%} above live; less than separate "
        f"{row['less_than_separate']:.1%}, than the caching allocator {row['less_than_caching']:.1%}; "
        f"not served {served['not_served']}"
    )


def main() -> None:
    parser = parser_of(__doc__, workloads=",".join(WORKLOADS), pairs=3, passes=10)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "MODE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        name, mode = asked.one
        print(json.dumps(make(name) if mode == "make" else run(name, mode, asked.passes)))
        return
    taken(asked, asked.workloads.split(","), lambda name: one(name, asked.pairs, asked.passes), line)


if __name__ == "__main__":
    main()
