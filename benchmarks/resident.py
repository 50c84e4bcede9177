"""Resident memory of whole processes: the same training in-core and under a plan, each in a process of its own.

``ru_maxrss`` after three optimizer steps, less what it was after the imports: each process is forked from one that has
done nothing but import. The in-core process does not use the package at all beyond loading the workload; glibc's
allocator is left as it is.

    python -m benchmarks.resident [--workload gpt2] [--budget smallest] [--set batch_size=8] [-o FILE.json]
"""

from __future__ import annotations

import json
import resource
import tempfile
from contextlib import nullcontext
from pathlib import Path

from benchmarks.facts import parser_of, write_results
from benchmarks.pairs import load, profiled
from benchmarks.processes import import_all, in_a_process

STEPS = 3


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth_bytes(name: str, settings: dict[str, str], plan_file: Path | None = None) -> int:
    """Trains for three steps; the growth of the largest resident set since the imports, in bytes."""
    import poochplan

    plan = poochplan.Plan.load(plan_file) if plan_file else None
    baseline = max_resident_bytes()
    workload = load(name, settings)
    assert workload.optimizer is not None
    with poochplan.apply(plan, workload.model, meter="never") if plan else nullcontext():
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            loss = workload.step()  # lives on into the next step, as in most loops
            loss.backward()
            workload.optimizer.step()
    return max_resident_bytes() - baseline


def make_plan(name: str, settings: dict[str, str], budget: str, path: Path) -> dict[str, float]:
    import poochplan

    profile = profiled(load(name, settings), name, iterations=1)
    wanted = poochplan.planner.smallest_budget(profile) if budget == "smallest" else budget
    plan = poochplan.plan(profile, wanted, evaluations=200)  # resident memory is asked for, not the fastest step
    plan.save(path, force=True)
    return {"in_core_peak_bytes": profile.in_core_peak_bytes, "predicted_peak_bytes": plan.prediction.peak_bytes}


def measure(name: str, settings: dict[str, str], budget: str) -> dict[str, float]:
    """Growth of the resident set of both processes, and the saving."""
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        facts = in_a_process(make_plan, name, settings, budget, plan_file)
        in_core = in_a_process(growth_bytes, name, settings)
        planned = in_a_process(growth_bytes, name, settings, plan_file)
    return {**facts, "in_core_rss_bytes": in_core, "planned_rss_bytes": planned, "saving": 1 - planned / in_core}


def main() -> None:
    parser = parser_of(__doc__, workload=("gpt2", "name of a file in configs/, or any WORKLOAD"), budget="smallest")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in asked.set)
    found = {"workload": asked.workload, **settings, **measure(asked.workload, settings, asked.budget)}
    print(json.dumps(found, indent=1))
    write_results(asked.output, found)


if __name__ == "__main__":
    main()
