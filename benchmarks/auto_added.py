"""What ``poochplan.auto`` adds to a training process: resident memory, seconds of a processor, and large modules.

A small transformer trains for three steps as it is, then under ``auto``. What is told, each time less what was there
before ``import poochplan``, is VmRSS, CPU seconds less those of as many plain steps, and which of ``HEAVY`` have come:

* begun:    behind the import, entering, and the first three steps
* planned:  behind the step from which on a plan is in force; all that was profiled is in it
* followed: ten steps behind that

A first run, which is not told, builds the native parts and measures what the runtime costs; the link is given. With
``--optimizer plain`` the optimizer is one written here: torch's own load its compiler as they are made.

    OMP_NUM_THREADS=1 python -m benchmarks.auto_added [--optimizer adam] [--runs 5] [-o FILE.json]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import MIB, facts_of_run, parser_of, write_results
from benchmarks.processes import in_a_process

HEAVY = ("highspy", "matplotlib", "numba", "pandas", "pulp", "scipy", "sympy", "torch._dynamo", "torch._inductor")
STAGES = ("begun", "planned", "followed")
FIRST, FOLLOWED, MOST = 3, 10, 60
"""Steps: before and in *begun*, in *followed*, and at most until there is a plan."""


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def made(optimizer: str) -> tuple[Any, Any, Callable[[], None]]:
    import torch
    from torch import nn

    class Descent(torch.optim.Optimizer):
        def add_param_group(self, param_group: dict[str, Any]) -> None:  # torch's own loads the compiler
            self.param_groups.append(param_group)

        def zero_grad(self, set_to_none: bool = True) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=1e-3)

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model, rows = nn.TransformerEncoder(layer, 3), torch.randn(8, 64, 128)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    found = torch.optim.Adam(groups) if optimizer == "adam" else Descent(groups, {})

    def step() -> None:
        model(rows).square().mean().backward()
        found.step()
        found.zero_grad()

    return model, found, step


def run(optimizer: str) -> dict[str, dict[str, Any]]:
    model, steps, step = made(optimizer)
    for _ in range(FIRST):
        step()
    start_s = time.process_time()
    for _ in range(FIRST):
        step()
    step_s = (time.process_time() - start_s) / FIRST
    before = {name for name in HEAVY if name in sys.modules}
    base_bytes, start_s, taken = resident_bytes(), time.process_time(), 0
    found: dict[str, dict[str, Any]] = {}

    def go(count: int) -> None:
        nonlocal taken
        taken += count
        for _ in range(count):
            step()

    def tell(stage: str) -> None:
        found[stage] = {
            "resident_bytes": resident_bytes() - base_bytes,
            "cpu_s": time.process_time() - start_s - taken * step_s,
            "loaded": sorted(name for name in HEAVY if name in sys.modules and name not in before),
        }

    import poochplan
    from poochplan.formats.profile import preset_link

    with tempfile.TemporaryDirectory() as cache:
        options: dict[str, Any] = {"cache": cache, "link": preset_link("pcie3"), "quiet": True}
        with poochplan.auto(model, steps, budget="70%", **options) as session:
            go(FIRST)
            tell("begun")
            while session.plan is None and taken < MOST:
                go(1)
                session.wait_until_planned()
            tell("planned")
            go(FOLLOWED)
            tell("followed")
        if session.plan is None:
            raise SystemExit(f"no plan after {taken} steps")
    return found


def main() -> None:
    parser = parser_of(__doc__, runs=5)
    parser.add_argument("--optimizer", choices=("adam", "plain"), default="adam")
    arguments = parser.parse_args()
    rows = [in_a_process(run, arguments.optimizer, start="spawn") for _ in range(arguments.runs + 1)][1:]
    for stage in STAGES:
        told = [row[stage] for row in rows]
        resident, seconds = ([one[name] for one in told] for name in ("resident_bytes", "cpu_s"))
        loaded = ", ".join(sorted({name for one in told for name in one["loaded"]})) or "nothing"
        print(
            f"{stage:8}  {median(resident) / MIB:5.1f} MiB (most {max(resident) / MIB:.1f}), "
            f"{median(seconds):.2f} s (most {max(seconds):.2f}), loaded: {loaded}"
        )
    write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})


if __name__ == "__main__":
    main()
