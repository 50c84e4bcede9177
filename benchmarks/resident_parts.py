"""What the resident memory is made of, after each step: in-core, everything kept, planned. In bytes:

* files:    pages of libraries and other mapped files
* arena:    pages of the arena that the process holds
* torch:    what torch has of the C library (the tests' hook): parameters, gradients, optimizer state, inputs
* others:   what others have of it: oneDNN's cached primitives, autograd's nodes, Python's large objects
* kernels:  pages with compiled code that belong to no file: what oneDNN compiles
* rest:     all else: what the C library keeps after a free, Python's small objects, stacks

    python -m benchmarks.resident_parts [--workloads small-unet,gpt2] [--steps 10] -o FILE.json
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from pathlib import Path
from typing import Literal

import poochplan
from benchmarks.facts import MIB, Row, parser_of, table_row, taken
from benchmarks.processes import in_a_process

Mode = Literal["plain", "keep", "on"]
MODES: tuple[Mode, ...] = ("plain", "keep", "on")
PARTS = ("resident", "files", "arena", "torch", "others", "kernels", "rest")
SECOND, SERVED = 2, 5
"""Growth is told from behind the second step, and from behind the fifth, when the arena has been in use."""


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
    asked = parser_of(__doc__, workloads="small-unet,gpt2", steps=10).parse_args()

    from benchmarks.hooked import ready_to_fork

    ready_to_fork()
    taken(asked, asked.workloads.split(","), lambda name: one(name, asked.steps), told)


if __name__ == "__main__":
    main()
