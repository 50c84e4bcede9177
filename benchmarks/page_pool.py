r"""Planned steps from a pool of pages against the same steps from one arena: seconds, fresh memory, mappings and bits.

Each mode of a workload is a process of its own under the same plan. The processes take a step each in turn, in
alternating order, and a ratio is that of two neighbours. *Fresh* memory is what the kernel has given: page faults, and
what the pool has mapped, because a fault may be of a huge page. The peak is that of the tests' own hook.

    python -m benchmarks.page_pool [--workloads gpt2,unet3d] [--pairs 9] [--threads 1 2] -o FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import poochplan
from benchmarks.arena import fresh
from benchmarks.facts import MIB, Row, parser_of, taken
from benchmarks.measured_steps import MeasuredSteps
from benchmarks.pairs import profiled
from benchmarks.plans import budget_of, decisions_of, predicted
from poochplan.formats.plan import Plan
from poochplan.runtime.arena import page_pool
from tests.allocated_bytes import allocated_bytes

WORKLOADS = ("gpt2", "bert", "resnet50", "unet3d", "seq2seq", "char_rnn", "small-unet")
WARM = 6
"""Steps before those that count: the arena learns its layout in them, the pool meets its ranges."""
POOL = "65536,16384"
PLANS = "benchmarks/results/page-pool-plans"


def make(name: str, kept: float, folder: Path) -> None:
    """Plans for an arena and without one, at the same budget; they stay in the folder."""
    if (folder / "off.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    profile = profiled(fresh(name), name, iterations=2)
    budget_bytes = max(budget_of(profile, kept), poochplan.smallest_budget(profile, arena="on"))
    for arena in ("on", "off"):
        plan = poochplan.plan(profile, budget_bytes, time_limit_s=3, arena=arena)
        plan.save(folder / f"{arena}.json", force=True)


class Steps(MeasuredSteps):
    """One step each time that it is asked for by a line of its input; what it found is a line of its output."""

    def serve(self, session: Any) -> None:
        for line in sys.stdin:
            if line.strip() == "end":
                break
            before = page_pool.counts()
            seconds, processor = self.one()
            after = page_pool.counts()
            row = {"wall": seconds, "cpu": processor, "faults": self.faults[-1], "resident": self.resident[-1]}
            row |= {
                name: getattr(after, name) - getattr(before, name)
                for name in ("blocks", "exact", "split", "composed", "moves", "moved_bytes", "fresh_bytes", "emptied")
            }
            row |= {name: getattr(after, name) for name in ("live_bytes", "free_bytes", "limit_bytes")}
            row |= {"most_mappings": after.most_mappings, "maps": len(Path("/proc/self/maps").read_text().splitlines())}
            row |= {"huge_bytes": huge_bytes()}
            row |= {"peak": self.peaks[-1] if self.peaks else 0, "fallbacks": session.report().total.fallbacks}
            print(json.dumps(row), flush=True)
        print(self.found()["digest"], flush=True)


def huge_bytes() -> int:
    """Of this process, in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(one.split()[1]) << 10 for one in lines if one.startswith("AnonHugePages"))


def run(name: str, mode: str, folder: Path, threads: int) -> None:
    """Steps in one mode, as they are asked for. ``-peak``: under the hook, and nothing is timed."""
    meter = allocated_bytes() if mode.endswith("-peak") else None
    torch.set_num_threads(threads)
    workload = fresh(name)
    torch.manual_seed(1)
    seen = Steps(workload, meter)
    plan = Plan.load(folder / ("off.json" if mode.startswith(("own", "off")) else "on.json"))
    arena: Any = "on" if mode.startswith("arena") else "off"
    with poochplan.apply(plan, workload.model, arena=arena, meter="always" if meter is None else "never") as session:
        if meter is not None:
            page_pool.library().pool_tell_to(meter._library.hook_change)
            if arena == "on":
                seen.arena_bytes = lambda: report.size_bytes if (report := session.report().arena) else 0
        seen.serve(session)


class Process:
    """A mode's process."""

    def __init__(self, name: str, mode: str, folder: Path, threads: int, pool: str) -> None:
        pooled = not mode.startswith(("arena", "off"))
        environment = {page_pool.SWITCH: pool if pooled else "0", "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.page_pool", "--one", name, mode, str(folder)]
        self._popen = subprocess.Popen(
            [*command, "--threads", str(threads)],
            env=dict(os.environ) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _ask(self, what: str) -> str:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(f"{what}\n")
        self._popen.stdin.flush()
        return self._popen.stdout.readline()

    def step(self) -> Row:
        return dict(json.loads(self._ask("step")))

    def end(self) -> str:
        """The digest of all of its steps."""
        digest = self._ask("end").strip()
        self._popen.wait()
        return digest


def one(name: str, asked: argparse.Namespace, threads: int) -> Row:
    folder = Path(asked.plans) / f"{name}-{asked.kept}"
    make(name, asked.kept, folder)
    plan, own = Plan.load(folder / "on.json"), Plan.load(folder / "off.json")
    found: Row = {"workload": name, "threads": threads, "budget_bytes": plan.budget_bytes, "pool": asked.pool}
    found |= {"decisions": decisions_of(plan)} | predicted(plan, "overhead", "arena_bytes", "arena_live_bytes")
    found |= {"own_decisions": decisions_of(own), "own_overhead": own.prediction.overhead}
    modes = asked.modes.split(",")
    processes = {mode: Process(name, mode, folder, threads, asked.pool) for mode in modes}
    rows: dict[str, list[Row]] = {mode: [] for mode in modes}
    for turn in range(WARM + asked.pairs):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            rows[mode].append(processes[mode].step())
    digests = {mode: process.end() for mode, process in processes.items()}
    found |= {
        "bitwise": digests.get("pool", "") == digests.get("arena", ""),
        "warm": {m: r[:WARM] for m, r in rows.items()},
    }
    for mode in modes:
        found[mode] = of_mode(rows[mode][WARM:])
    for mode in modes[1:]:
        found[f"{mode}/{modes[0]}"] = {
            clock: spread([a[clock] / b[clock] for a, b in zip(rows[mode][WARM:], rows[modes[0]][WARM:], strict=True)])
            for clock in ("wall", "cpu")
        }
    return found | {"peaks": {m: peak(name, m, folder, asked, plan) for m in modes}}


def peak(name: str, mode: str, folder: Path, asked: argparse.Namespace, plan: Plan) -> float:
    """The most bytes of any step by the hook, of the budget."""
    if not asked.peaks:
        return 0.0
    process = Process(name, f"{mode}-peak", folder, 1, asked.pool)
    most = max(process.step()["peak"] for _ in range(WARM))
    process.end()
    return most / plan.budget_bytes


def of_mode(rows: list[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def line(row: Row) -> str:
    told = []
    for key in row:
        if "/" in key:
            wall, cpu = row[key]["wall"], row[key]["cpu"]
            told.append(
                f"{key} {wall['median']:.3f} ({wall['least']:.3f} to {wall['most']:.3f}), cpu {cpu['median']:.3f}"
            )
    for mode in ("arena", "pool", "own"):
        if mode in row:
            one = row[mode]
            told.append(
                f"{mode}: {one['wall']:.3f} s, faults {one['faults']:.0f}, fresh {one['fresh_bytes'] / MIB:.1f} MiB, huge {one['huge_bytes'] / MIB:.0f} MiB, "
                f"blocks {one['blocks']:.0f} = exact {one['exact']:.0f} split {one['split']:.0f} composed "
                f"{one['composed']:.0f}, moves {one['moves']:.0f} ({one['moved_bytes'] / MIB:.0f} MiB), mappings "
                f"{one['most_mappings']:.0f}, maps {one['maps']:.0f}, peak {row['peaks'][mode]:.4f}"
            )
    bits = "same bits" if row["bitwise"] else "OTHER BITS"
    return f"{row['workload']:10} {row['threads']} thr {row['decisions']} {bits}\n    " + "\n    ".join(told)


def main() -> None:
    parser = parser_of(__doc__, workloads=",".join(WORKLOADS), pairs=9, kept=0.3, modes="arena,pool", pool=POOL)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peaks", action="store_true", help="measure them too, in processes of their own")
    parser.add_argument("--plans", default=PLANS)
    parser.add_argument("--make", action="store_true", help="only the plans")
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        name, mode, folder = asked.one
        run(name, mode, Path(folder), asked.threads[0])
    elif asked.make:
        for name in asked.workloads.split(","):
            make(name, asked.kept, Path(asked.plans) / f"{name}-{asked.kept}")
    else:
        pairs = [(name, threads) for name in asked.workloads.split(",") for threads in asked.threads]
        taken(asked, pairs, lambda pair: one(pair[0], asked, pair[1]), line)


if __name__ == "__main__":
    main()
