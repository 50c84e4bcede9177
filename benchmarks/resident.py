"""Resident memory of whole processes: the same training in-core and under a plan, each in a process of its own.

``ru_maxrss`` after three optimizer steps, less what it was after the imports: each process is forked from one that has
done nothing but import. The in-core process does not use the package at all beyond loading the workload; glibc's
allocator is left as it is.

With ``--parts``, what the resident memory is made of, after each step: in-core, everything kept, planned. In bytes:

* files:    pages of libraries and other mapped files
* arena:    pages of the arena that the process holds
* torch:    what torch has of the C library (the tests' hook): parameters, gradients, optimizer state, inputs
* others:   what others have of it: oneDNN's cached primitives, autograd's nodes, Python's large objects
* kernels:  pages with compiled code that belong to no file: what oneDNN compiles
* rest:     all else: what the C library keeps after a free, Python's small objects, stacks

    python -m benchmarks.resident [--workload gpt2] [--budget smallest] [--set batch_size=8] [-o FILE.json]
    python -m benchmarks.resident --parts [small-unet gpt2] [--steps 10] -o FILE.json
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import tempfile
from pathlib import Path
from typing import Literal

import poochplan  # and nothing large: what is imported before the fork decides what the C library has to give
from benchmarks.facts import MIB, Row, parser_of, table_row, taken, write_results
from benchmarks.processes import import_all, in_a_process

STEPS = 3
Mode = Literal["plain", "keep", "on"]
MODES: tuple[Mode, ...] = ("plain", "keep", "on")
PARTS = ("resident", "files", "arena", "torch", "others", "kernels", "rest")
SECOND, SERVED = 2, 5
"""Growth is told from behind the second step, and from behind the fifth, when the arena has been in use."""


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth_bytes(target: str, settings: dict[str, str], plan_file: Path | None = None) -> int:
    """Trains for three steps; the growth of the largest resident set since the imports, in bytes."""
    from benchmarks.pairs import load, one_step

    plan = poochplan.Plan.load(plan_file) if plan_file else None
    baseline = max_resident_bytes()
    workload = load(target, settings)

    def train() -> None:
        for _ in range(STEPS):
            one_step(workload)

    if plan is None:
        train()
    else:
        with poochplan.apply(plan, workload.model, meter="never"):
            train()
    return max_resident_bytes() - baseline


def make_plan(target: str, settings: dict[str, str], budget: str, path: Path) -> dict[str, float]:
    from benchmarks.pairs import load, profiled

    profile = profiled(load(target, settings), target, iterations=1)
    wanted = poochplan.smallest_budget(profile) if budget == "smallest" else budget
    plan = poochplan.plan(profile, wanted, evaluations=200)  # resident memory is asked for, not the fastest step
    plan.save(path, force=True)
    return {"in_core_peak_bytes": profile.in_core_peak_bytes, "predicted_peak_bytes": plan.prediction.peak_bytes}


def measure(target: str, settings: dict[str, str], budget: str) -> Row:
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        facts = in_a_process(make_plan, target, settings, budget, plan_file)
        in_core = in_a_process(growth_bytes, target, settings)
        planned = in_a_process(growth_bytes, target, settings, plan_file)
    return {**facts, "in_core_rss_bytes": in_core, "planned_rss_bytes": planned, "saving": 1 - planned / in_core}


# -- parts ------------------------------------------------------------------------------------------------------------


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_use_bytes() -> int:
    """What the process has of the C library, large blocks that have mappings of their own among it."""
    found = ctypes.CDLL(None)
    found.mallinfo2.restype = _MallocInfo
    info = found.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def status_bytes(*names: str) -> int:
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(row[1]) * 1024 for row in rows if row and row[0].rstrip(":") in names)


def kernel_bytes() -> int:
    """Resident pages that can be run and belong to no file."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        row = line.split()
        if not row[0].endswith(":"):
            is_code = "x" in row[1] and len(row) < 6
        elif is_code and row[0] == "Rss:":
            total += int(row[1]) * 1024
    return total


def sample(session: poochplan.Session | None) -> dict[str, int]:
    from tests.allocated_bytes import allocated_bytes
    from tests.runtime.arena.steps import resident_bytes

    gc.collect()
    resident, files = status_bytes("VmRSS"), status_bytes("RssFile", "RssShmem")
    found = session._step_arena._runs.arena if session is not None and session._step_arena is not None else None
    arena = (resident_bytes(found) or 0) if found is not None else 0
    by_torch, kernels = allocated_bytes().live, kernel_bytes()
    others = in_use_bytes() - by_torch
    rest = resident - files - arena - by_torch - others - kernels
    return dict(zip(PARTS, (resident, files, arena, by_torch, others, kernels, rest), strict=True))


def run(name: str, mode: Mode, folder: Path, steps: int) -> list[dict[str, int]]:
    import torch

    from benchmarks.arena import fresh
    from benchmarks.pairs import one_step

    workload = fresh(name)
    torch.manual_seed(1)

    def go(session: poochplan.Session | None) -> list[dict[str, int]]:
        samples = [sample(session)]
        for _ in range(steps):
            one_step(workload)
            samples.append(sample(session))
        return samples

    if mode == "plain":
        return go(None)
    with poochplan.apply(poochplan.Plan.load(folder / f"{mode}.json"), workload.model, arena="on") as session:
        return go(session)


def one(name: str, steps: int) -> Row:
    from benchmarks.arena import make

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        promised = in_a_process(make, name, folder)
        found = {mode: in_a_process(run, name, mode, folder, steps) for mode in MODES}
    return {"workload": name, "promised": promised, "samples": found}


def told(row: Row) -> str:
    """Rows of the Markdown table in README.md: after the last step, and growth."""
    lines = []
    for mode, samples in row["samples"].items():
        last = samples[-1]
        parts = (f"{last[part] / MIB:.1f}" for part in PARTS)
        growth = (f"{(last['resident'] - samples[step]['resident']) / MIB:+.1f}" for step in (SECOND, SERVED))
        lines.append(table_row(row["workload"], mode, *parts, *growth))
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, workload=("gpt2", "name of a file in configs/, or any WORKLOAD"), budget="smallest", steps=10
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--parts", nargs="*", metavar="WORKLOAD", help="of benchmarks.arena (small-unet, gpt2)")
    asked = parser.parse_args()
    if asked.parts is not None:
        from benchmarks.hooked import ready_to_fork

        ready_to_fork()
        taken(asked, asked.parts or ["small-unet", "gpt2"], lambda name: one(name, asked.steps), told)
        return
    settings = dict(pair.split("=", 1) for pair in asked.set)
    found = {"workload": asked.workload, **settings, **measure(asked.workload, settings, asked.budget)}
    print(json.dumps(found, indent=1))
    write_results(asked.output, found)


if __name__ == "__main__":
    main()
