"""Steps that do not fit: profiled, planned and run under a memory limit; and what profiles of large models cost.

* ``unfit``: the address space of every process is limited (``ulimit -v``) to what it takes before the step, and a share
  of what the in-core step needs. In-core training must die of it. ``pooch profile`` (fake, and auto, which has to
  choose swap-all), ``pooch plan`` and two planned steps must not, and loss, gradients and buffers of these have to be
  bitwise those of in-core training without a limit.
* ``cost``: wall time and largest resident memory of ``pooch profile --mode fake``: GPT-2 medium with every distinct op
  timed by itself (nothing remembered) and by a roofline, and a model of GPT-3's size (96 layers of 12,288).

    python -m benchmarks.large_steps unfit -o benchmarks/results/unfit.json
    python -m benchmarks.large_steps cost -o benchmarks/results/profile_cost.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results

HERE = Path(__file__).parent
CONFIG, SETTINGS = HERE.parent / "configs" / "gpt2.toml", {"batch_size": "8"}
STEPS = 2
LIMIT_SHARE = 0.75
"""Of what the in-core step needs beside the process itself. The budget is lower: a process needs more than tensors."""
BUDGET = "50%"
COSTS: dict[str, list[str]] = {
    "GPT-2 medium, 1 x 1,024 tokens, ops timed": ["gpt2_medium", "--set", "batch_size=1"],
    "GPT-2 medium, 8 x 1,024 tokens, roofline": ["gpt2_medium", "--set", "batch_size=8", "--roofline", "h200"],
    "GPT-3 (96 layers of 12,288), 1 x 2,048 tokens, roofline": ["gpt3", "--roofline", "h200"],
}


def gpt2_medium(*, batch_size: int = 1) -> Any:
    """A workload of GPT-2 medium: 24 layers of 1,024, 1,024 tokens."""
    from poochplan.workloads.text import gpt2

    return gpt2(
        batch_size=batch_size, sequence_length=1024, layers=24, width=1024, heads=16, vocabulary=50257, dropout=0.1
    )


def gpt3() -> Any:
    """A workload of GPT-3's size: 96 layers of 12,288, 175 billion parameters."""
    from poochplan.workloads.text import gpt2

    return gpt2(batch_size=1, sequence_length=2048, layers=96, width=12288, heads=96, vocabulary=50257, dropout=0.1)


# -- unfit ------------------------------------------------------------------------------------------------------------


def train(plan_path: str | None) -> dict[str, Any]:
    """A digest of loss, gradients and buffers of each step, in-core or under a plan. Runs in a process of its own."""
    import torch

    import poochplan
    from poochplan.workload import load_workload

    torch.manual_seed(0)
    workload = load_workload(str(CONFIG), SETTINGS).workload
    assert workload.optimizer is not None
    digests = []

    def steps() -> None:
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            loss = workload.step()
            loss.backward()
            workload.optimizer.step()
            digest = hashlib.sha256(loss.detach().numpy().tobytes())
            for tensor in (*(p.grad for p in workload.model.parameters()), *workload.model.buffers()):
                digest.update(tensor.detach().contiguous().numpy().tobytes())
            digests.append(digest.hexdigest()[:16])

    torch.manual_seed(1)
    if plan_path is None:
        steps()
        return {"steps": digests}
    with poochplan.apply(poochplan.Plan.load(plan_path), workload.model) as session:
        steps()
    total = session.report().total
    return {"steps": digests, "peak_bytes": total.peak_bytes, "fallbacks": total.fallbacks}


def address_space_bytes() -> dict[str, Any]:
    """What a process takes with the workload built, before any step."""
    import poochplan
    from poochplan.workload import load_workload

    assert poochplan.apply
    workload = load_workload(str(CONFIG), SETTINGS).workload
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    static = sum(p.numel() * p.element_size() for p in workload.model.parameters())
    return {"address_space_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "parameter_bytes": static}


def limited(limit_bytes: int | None) -> Callable[[], None]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return limit


def run(words: list[str], limit_bytes: int | None = None, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Exit code, seconds, largest resident memory, last line of error, and what the command printed as JSON."""
    start_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            words, stdout=out, stderr=err, preexec_fn=limited(limit_bytes), env=os.environ | (environment or {})
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, complained = out.read(), err.read().strip()
    return {
        "exit_code": child.returncode,
        "seconds": round(time.perf_counter() - start_s, 1),
        "largest_resident_bytes": usage.ru_maxrss * 1024,
        "error": complained.splitlines()[-1] if child.returncode and complained else "",
        "printed": json.loads(printed) if child.returncode == 0 and printed.startswith("{") else {},
    }


def pooch(*words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from poochplan.cli import main; sys.exit(main())", *words]


def this(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.large_steps", *words]


def unfit() -> dict[str, Any]:
    """The whole way under the limit."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        files = {mode: str(Path(folder) / f"{mode}.json") for mode in ("auto", "fake")}
        before = run(this("address-space"))["printed"]
        run(pooch("profile", str(CONFIG), *settings, "--mode", "fake", "-o", files["fake"], "--force"))
        profile = json.loads(Path(files["fake"]).read_text())
        needed_bytes = profile["in_core_peak_bytes"] - before["parameter_bytes"]
        limit_bytes = before["address_space_bytes"] + int(LIMIT_SHARE * needed_bytes)
        rows: dict[str, Any] = {"in-core, no limit": run(this("train")), "in-core": run(this("train"), limit_bytes)}
        for mode, path in files.items():
            words = ["profile", str(CONFIG), *settings, "--mode", mode, "-o", path, "--force"]
            rows[f"profile {mode}"] = run(pooch(*words, "--json"), limit_bytes)
            plan = str(Path(folder) / f"plan-{mode}.json")
            rows[f"plan of {mode}"] = run(
                pooch("plan", path, "--budget", BUDGET, "--time-limit", "8", "-o", plan, "--json"), limit_bytes
            )
            rows[f"steps, plan of {mode}"] = run(this("train", "--plan", plan), limit_bytes)
    reference = rows["in-core, no limit"]["printed"]
    return {
        "before": before,
        "in_core_peak_bytes": profile["in_core_peak_bytes"],
        "needed_bytes": needed_bytes,
        "limit_bytes": limit_bytes,
        "in_core_dies": rows["in-core"]["exit_code"] != 0,
        "bitwise": {
            name: row["printed"].get("steps") == reference["steps"]
            for name, row in rows.items()
            if name.startswith("steps")
        },
        "rows": {name: row | {"printed": _short(row["printed"])} for name, row in rows.items()},
    }


def _short(printed: dict[str, Any]) -> dict[str, Any]:
    """What of a command's JSON is worth keeping."""
    keys = ("mode", "notes", "in_core_peak_bytes", "peak_bytes", "fallbacks", "budget_bytes", "steps")
    return {key: printed[key] for key in keys if key in printed}


# -- cost -------------------------------------------------------------------------------------------------------------


def cost() -> dict[str, Any]:
    """Each profile in a process of its own, one after the other; nothing remembered."""
    rows = {}
    for name, (function, *words) in COSTS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [*pooch("profile", f"{__file__}:{function}", "--mode", "fake", *words)]
            command += ["-o", str(Path(folder) / "profile.json.gz"), "--json"]
            found = run(command, environment={"XDG_CACHE_HOME": folder})
            rows[name] = found | {"printed": _short(found["printed"])}
            print(name, found["seconds"], "s", found["largest_resident_bytes"] >> 20, "MiB", found["error"], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("unfit", "cost", "train", "address-space"))
    parser.add_argument("--plan")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    if arguments.what in ("train", "address-space"):
        print(json.dumps(train(arguments.plan) if arguments.what == "train" else address_space_bytes()))
        return 0
    found = unfit() if arguments.what == "unfit" else cost()
    print(json.dumps(found, indent=1))
    write_results(arguments.output, facts_of_run(arguments) | {"found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
