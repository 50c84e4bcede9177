"""`make demo` again and again with empty caches, every second one beside a busy core: whether it ends well, and what it
says; and its plan with caches cold and warm.

    python -m benchmarks.demo_runs -o benchmarks/results/demo.json

Takes a quarter of an hour. The environment (`make setup`) is there; what is emptied is the user's cache folder, with
what was compiled and measured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
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
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    runs = []
    for number in range(options.runs):
        runs.append(demo(busy=number % 2 == 1))
        print(json.dumps(runs[-1]), flush=True)
    plans = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            plans.append({"cold": planned(cache, "60%", 20.0), "warm": planned(cache, "60%", 20.0)})
        print(json.dumps(plans[-1]), flush=True)
    quiet = [run["seconds"] for run in runs if not run["busy"]]
    rows = {
        "passed": sum(run["status"] == 0 for run in runs),
        "runs": runs,
        "median_quiet_s": median(quiet) if quiet else None,
        "plans": plans,
    }
    write_results(options.output, facts_of_run(options) | rows)


if __name__ == "__main__":
    main()
