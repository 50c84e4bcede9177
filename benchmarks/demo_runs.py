"""`make demo` again and again with empty caches, alone or beside a busy core: whether it ends well, and what it says;
and its plan with caches cold and warm.

    python -m benchmarks.demo_runs --runs 5 --plans 3 -o benchmarks/results/demo.json
    python -m benchmarks.demo_runs --runs 5 --busy -o benchmarks/results/demo.json

Each takes some minutes, and adds to the results file. The environment (`make setup`) is there; what is emptied are
`demo-output` and the user's cache folder, with what was compiled and measured on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.facts import Row, facts_of_run, known_rows, parser_of, write_results
from benchmarks.plans import costs_of
from poochplan import Plan

ROOT = Path(__file__).parents[1]
BUSY = "while True: pass"


def demo(*, busy: bool) -> Row:
    """One `make demo`: its exit status and seconds, and what its files say."""
    shutil.rmtree(ROOT / "demo-output", ignore_errors=True)
    with tempfile.TemporaryDirectory() as cache:
        job = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
        start_s = time.perf_counter()
        try:
            done = subprocess.run(
                ["make", "demo"], cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": cache}, capture_output=True, text=True
            )
        finally:
            if job is not None:
                job.kill()
    found: Row = {"busy": busy, "status": done.returncode, "seconds": round(time.perf_counter() - start_s, 1)}
    if done.returncode:
        return found | {"said": done.stderr.strip().splitlines()[-3:]}
    plan = Plan.load(ROOT / "demo-output" / "plan.json")
    run = {line.partition("  ")[0].strip(): line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    said = {"in_core": "in-core step time", "planned": "planned step time", "measured_overhead": "measured overhead"}
    costs = {name: round(cost or 0.0, 4) for name, cost in costs_of(plan).items()}
    found |= {key: run.get(name, "") for key, name in (said | {"peak": "measured peak"}).items()}
    return found | {
        "plain_step_s": round(plan.prediction.in_core_step_s, 3),
        "predicted_step_s": round(plan.prediction.step_s, 3),
        "predicted_overhead": costs["overhead"],
        "gap": costs["gap"],
        "plan_s": costs["wall_s"],
        "bitwise": run.get("gradients bitwise equal", "").startswith("yes"),
    }


def planned(cache: str, budget: str, limit_s: float) -> Row:
    command = [str(ROOT / ".venv/bin/pooch"), "plan", "demo-output/profile.json", "--budget", budget]
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        subprocess.run(
            [*command, "--time-limit", str(limit_s), "-o", str(plan)],
            cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": cache}, capture_output=True, check=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start_s
        overhead = Plan.load(plan).prediction.overhead
    return {"seconds": round(seconds, 1), "overhead": round(overhead, 4)}


def main() -> None:
    parser = parser_of(__doc__, runs=0, busy=(False, "beside a process that keeps one core busy"), plans=0)
    options = parser.parse_args()
    facts = facts_of_run(options)
    found = {part: known_rows(options.output, part) for part in ("runs", "plans")}

    def add(part: str, row: Row) -> None:
        found[part].append(row | {"commit": facts["commit"]})
        print(json.dumps(row), flush=True)
        alone = [run["seconds"] for run in found["runs"] if not run["busy"]]
        told = {"passed": sum(run["status"] == 0 for run in found["runs"])}
        write_results(options.output, facts | told | {"median_alone_s": median(alone) if alone else None} | found)

    for _ in range(options.runs):
        add("runs", demo(busy=options.busy))
    for _ in range(options.plans):
        with tempfile.TemporaryDirectory() as cache:
            add("plans", {"cold": planned(cache, "60%", 20.0), "warm": planned(cache, "60%", 20.0)})


if __name__ == "__main__":
    main()
