"""Resident memory of whole processes: the same training in-core and under a plan, each in a fresh process.

``ru_maxrss`` after three optimizer steps, less what it was after the imports. The in-core process does not use the
package at all beyond loading the workload; glibc's allocator is left as it is.

    python -m benchmarks.resident [--workload gpt2] [--budget smallest] [--set batch_size=8] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STEPS = 3


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(target: str, settings: dict[str, str], plan_file: str | None) -> int:
    """Trains for three steps; the growth of the largest resident set since the imports, in bytes."""
    import torch

    import poochplan
    from poochplan.workload import load_workload

    for module in ("transformers", "monai.networks.nets", "torch._dynamo"):  # what building a workload may import
        __import__(module)
    plan = poochplan.Plan.load(plan_file) if plan_file else None
    baseline = max_resident_bytes()
    torch.manual_seed(0)
    workload = load_workload(target, settings).workload
    assert workload.optimizer is not None

    def train() -> None:
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            loss = workload.step()
            loss.backward()
            workload.optimizer.step()

    if plan is None:
        train()
    else:
        with poochplan.apply(plan, workload.model, meter="never"):
            train()
    return max_resident_bytes() - baseline


def make_plan(target: str, settings: dict[str, str], budget: str, path: Path) -> dict[str, float]:
    import torch

    import poochplan
    from poochplan.planner.planning import smallest_budget
    from poochplan.workload import load_workload

    torch.manual_seed(0)
    workload = load_workload(target, settings).workload
    profile = poochplan.profile(workload.step, model=workload.model, optimizer=workload.optimizer, iterations=2)
    wanted = smallest_budget(profile) if budget == "smallest" else budget
    plan = poochplan.plan(profile, wanted, evaluations=200)  # resident memory is asked for, not the fastest step
    plan.save(path, force=True)
    return {"in_core_peak_bytes": profile.in_core_peak_bytes, "predicted_peak_bytes": plan.prediction.peak_bytes}


def measure(target: str, settings: dict[str, str], budget: str) -> dict[str, float]:
    """Growth of the resident set of both processes, and the saving."""
    command = [sys.executable, "-m", "benchmarks.resident", "--workload", target]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        facts = json.loads(_run([*command, "--budget", budget, "--child", "plan", "--plan", str(plan_file)]))
        in_core = int(_run([*command, "--child", "in-core"]))
        planned = int(_run([*command, "--child", "planned", "--plan", str(plan_file)]))
    return {**facts, "in_core_rss_bytes": in_core, "planned_rss_bytes": planned, "saving": 1 - planned / in_core}


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt2", help="name of a file in configs/, or any WORKLOAD")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--budget", default="smallest")
    parser.add_argument("-o", "--output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = HERE.parent / "configs" / f"{arguments.workload}.toml"
    target = str(config) if config.exists() else arguments.workload
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    if arguments.child == "plan":
        print(json.dumps(make_plan(target, settings, arguments.budget, Path(arguments.plan))))
    elif arguments.child:
        print(child(target, settings, arguments.plan if arguments.child == "planned" else None))
    else:
        found = {"workload": arguments.workload, **settings, **measure(target, settings, arguments.budget)}
        print(json.dumps(found, indent=1))
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
