"""`make demo` again and again with empty caches, alone or beside a busy core: whether it ends well, and what it says;
and its plan with caches cold and warm.

    python -m benchmarks.demo_runs --runs 5 --plans 3 -o benchmarks/results/demo.json
    python -m benchmarks.demo_runs --runs 5 --busy -o benchmarks/results/demo.json

Each takes some minutes, and adds to the results file. The environment (`make setup`) is there; what is emptied are
`demo-output` and the user's cache folder, with what was compiled and measured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import facts_of_run, write_results

ROOT = Path(__file__).parents[1]
BUSY = "while True: pass"


def demo(*, busy: bool) -> dict[str, Any]:
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
    found = {"busy": busy, "status": done.returncode, "seconds": round(time.perf_counter() - start_s, 1)}
    if done.returncode:
        return found | {"said": done.stderr.strip().splitlines()[-3:]}
    plan = json.loads((ROOT / "demo-output" / "plan.json").read_text())
    run = {line.partition("  ")[0].strip(): line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    return found | {
        "plain_step_s": round(plan["prediction"]["in_core_step_s"], 3),
        "predicted_step_s": round(plan["prediction"]["step_s"], 3),
        "predicted_overhead": round(plan["prediction"]["overhead"], 4),
        "gap": round(plan["solve"]["gap"], 4),
        "plan_s": round(plan["solve"]["wall_s"], 1),
        "in_core": run.get("in-core step time", ""),
        "planned": run.get("planned step time", ""),
        "measured_overhead": run.get("measured overhead", ""),
        "bitwise": run.get("gradients bitwise equal", "").startswith("yes"),
        "peak": run.get("measured peak", ""),
    }


def planned(cache: str, budget: str, limit_s: float) -> dict[str, Any]:
    """`pooch plan` of the demo's profile."""
    command = [str(ROOT / ".venv/bin/pooch"), "plan", "demo-output/profile.json", "--budget", budget]
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        subprocess.run(
            [*command, "--time-limit", str(limit_s), "-o", str(plan)],
            cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": cache}, capture_output=True, check=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start_s
        said = json.loads(plan.read_text())
    return {"seconds": round(seconds, 1), "overhead": round(said["prediction"]["overhead"], 4)}


def main() -> None:
    """Runs them all and writes what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    parser.add_argument("--plans", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    facts = facts_of_run(options)
    known = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    runs, plans = known.get("runs", []), known.get("plans", [])

    def add(to: list[dict[str, Any]], found: dict[str, Any]) -> None:
        to.append(found | {"commit": facts["commit"]})
        print(json.dumps(found), flush=True)
        alone = [run["seconds"] for run in runs if not run["busy"]]
        passed, median_s = sum(run["status"] == 0 for run in runs), median(alone) if alone else None
        write_results(
            options.output, facts | {"passed": passed, "median_alone_s": median_s, "runs": runs, "plans": plans}
        )

    for _ in range(options.runs):
        add(runs, demo(busy=options.busy))
    for _ in range(options.plans):
        with tempfile.TemporaryDirectory() as cache:
            add(plans, {"cold": planned(cache, "60%", 20.0), "warm": planned(cache, "60%", 20.0)})


if __name__ == "__main__":
    main()
