r"""Steps that do not fit: profiled, planned and run under a memory limit; and what profiles of large models cost.

* ``unfit``: the address space of every process is limited (``ulimit -v``) to what it takes before the step, and a share
  of what the in-core step needs; with ``--cgroup`` its memory is, and page cache counts (root alone can).
  In-core training must die of it. ``pooch profile`` (fake, and auto, which has to choose swap-all), ``pooch plan`` and
  planned steps must not, and losses, gradients, buffers and parameters of these have to be bitwise those of in-core
  training without a limit. Peaks are by the tests' meter, with the arena whole.
* ``cost``: wall time and largest resident memory of ``pooch profile --mode fake``: GPT-2 medium with every distinct op
  timed by itself (nothing remembered) and by a roofline, and a model of GPT-3's size (96 layers of 12,288).

    python -m benchmarks.large_steps unfit -o benchmarks/results/unfit.json
    python -m benchmarks.large_steps unfit --workload unet3d --set side=192 --steps 6 --iterations 2 --plan-s 60 \
        --budget 60% --limit-share 0.95 --modes auto --cgroup -o benchmarks/results/unfit-192.json   # a volume of 192^3
    python -m benchmarks.large_steps cost -o benchmarks/results/profile_cost.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import facts_of_run, parser_of, write_results
from benchmarks.processes import POOCH

IN_CORE = "in-core, no limit", "in-core"
HERE = Path(__file__).parent
DEFAULTS = ("gpt2", ["batch_size=8"])
"""Workload and settings of ``unfit``."""
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
"""Where version 1 and version 2 are mounted."""
GPT2 = "poochplan.workloads.text:gpt2"
MEDIUM = {"sequence_length": 1024, "layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257}
GPT3 = MEDIUM | {"sequence_length": 2048, "layers": 96, "width": 12288, "heads": 96}
COSTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "GPT-2 medium, 1 x 1,024 tokens, ops timed": (MEDIUM | {"batch_size": 1}, []),
    "GPT-2 medium, 8 x 1,024 tokens, roofline": (MEDIUM | {"batch_size": 8}, ["--roofline", "h200"]),
    "GPT-3 (96 layers of 12,288), 1 x 2,048 tokens, roofline": (GPT3 | {"batch_size": 1}, ["--roofline", "h200"]),
}


# -- unfit ------------------------------------------------------------------------------------------------------------


def train(config: str, settings: list[str], steps: int, plan_path: str | None) -> dict[str, Any]:
    """Bits, seconds and peak of each step, in-core or under a plan. Runs in a process of its own."""
    import torch

    import poochplan
    from benchmarks.hooked import digest
    from benchmarks.measured_steps import MeasuredSteps, arena_bytes
    from poochplan.workload import load_workload
    from tests.allocated_bytes import allocated_bytes

    meter = allocated_bytes()
    before_bytes = meter.live
    torch.manual_seed(0)
    workload = load_workload(config, dict(pair.split("=", 1) for pair in settings)).workload
    torch.manual_seed(1)
    measured, digests = MeasuredSteps(workload, meter), []
    with contextlib.ExitStack() as stack:
        plan = poochplan.Plan.load(plan_path) if plan_path else None
        session = stack.enter_context(poochplan.apply(plan, workload.model)) if plan else None
        measured.arena_bytes = lambda: arena_bytes(session) if session else 0
        for _ in range(steps):
            measured.one()
            digests.append(digest(workload.model, torch.tensor(measured.losses[-1])))
        fallbacks = session.report().total.fallbacks if session else 0
    peaks = [peak_bytes - before_bytes for peak_bytes in measured.peaks]
    return {"steps": digests, "seconds": measured.seconds, "peak_bytes": max(peaks), "fallbacks": fallbacks}


def before_steps(config: str, settings: list[str]) -> dict[str, Any]:
    """What a process takes with the workload built, before any step."""
    import poochplan
    from poochplan.workload import load_workload

    assert poochplan.apply
    workload = load_workload(config, dict(pair.split("=", 1) for pair in settings)).workload
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    space, own = (int(sizes[name].split()[0]) * 1024 for name in ("VmSize", "RssAnon"))  # no pages of libraries' files
    static = sum(p.numel() * p.element_size() for p in workload.model.parameters())
    return {"address_space_bytes": space, "anonymous_bytes": own, "parameter_bytes": static}


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup below this process's own, of version 1 or 2, for as long as the block: page cache counts in it."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_memory = next((path for _, controllers, path in lines if controllers == "memory"), None)
    root = MEMORY_CGROUPS[of_memory is None]
    own = of_memory or next(path for _, controllers, path in lines if not controllers)
    folder = root / own.lstrip("/") / f"poochplan-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if of_memory else "memory.max"
        (folder / name).write_text(str(limit_bytes))
        yield folder
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):  # a process that ends is there for a moment
                folder.rmdir()
                break
            time.sleep(0.1)


def limited(limit_bytes: int | None, cgroup: Path | None) -> Callable[[], None]:
    def limit() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        elif limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return limit


def run(
    words: list[str],
    limit_bytes: int | None = None,
    environment: dict[str, str] | None = None,
    in_cgroup: bool = False,
) -> dict[str, Any]:
    """Exit code, seconds, largest resident memory, last line of error, and what the command printed as JSON. In a
    cgroup also its peak, page cache counted.
    """
    start_s = time.perf_counter()
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        cgroup = stack.enter_context(memory_cgroup(limit_bytes)) if in_cgroup and limit_bytes is not None else None
        child = subprocess.Popen(
            words, stdout=out, stderr=err, preexec_fn=limited(limit_bytes, cgroup), env=os.environ | (environment or {})
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if cgroup is not None:
            peaks = [cgroup / name for name in ("memory.max_usage_in_bytes", "memory.peak") if (cgroup / name).exists()]
            found["cgroup_peak_bytes"] = int(peaks[0].read_text()) if peaks else None
        out.seek(0)
        err.seek(0)
        printed, complained = out.read(), err.read().strip()
    return found | {
        "exit_code": child.returncode,
        "seconds": round(time.perf_counter() - start_s, 1),
        "largest_resident_bytes": usage.ru_maxrss * 1024,
        "error": complained.splitlines()[-1] if child.returncode and complained else "",
        "printed": json.loads(printed) if child.returncode == 0 and printed.startswith("{") else {},
    }


def this(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.large_steps", *words]


def unfit(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole way under the limit; with ``--in-core`` behind the in-core steps of an earlier run."""
    config = str(HERE.parent / "configs" / f"{arguments.workload}.toml")
    settings = [word for pair in arguments.set for word in ("--set", pair)]
    if arguments.in_core:
        found = json.loads(Path(arguments.in_core).read_text())["found"]
        in_core = {name: found["rows"][name] for name in IN_CORE}
        with tempfile.TemporaryDirectory() as folder:
            rows, judged = under_limit(arguments, [config, *settings], found["limit_bytes"], folder, in_core)
        return found | {"judged": judged, "rows": _shortened(rows)}
    before = run(this("before", "--workload", config, *settings))["printed"]
    with tempfile.TemporaryDirectory() as folder:
        whole = str(Path(folder) / "whole.json")
        run([*POOCH, "profile", config, *settings, "--mode", "fake", "--roofline", "cpu-core", "-o", whole])
        in_core_peak_bytes = json.loads(Path(whole).read_text())["in_core_peak_bytes"]
        needed_bytes = in_core_peak_bytes - before["parameter_bytes"]
        taken_bytes = before["anonymous_bytes" if arguments.cgroup else "address_space_bytes"]
        limit_bytes = taken_bytes + int(arguments.limit_share * needed_bytes)
        rows, judged = under_limit(arguments, [config, *settings], limit_bytes, folder, {})
    return {
        "before": before,
        "in_core_peak_bytes": in_core_peak_bytes,
        "needed_bytes": needed_bytes,
        "limit_bytes": limit_bytes,
        "page_cache_counted": arguments.cgroup,
        "in_core_dies": rows["in-core"]["exit_code"] != 0,
        "judged": judged,
        "rows": _shortened(rows),
    }


def under_limit(
    arguments: argparse.Namespace, workload: list[str], limit_bytes: int, folder: str, rows: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each process told, the first without a limit; and what became of the planned steps, by mode of profile.

    ``rows``: of in-core processes that have told before; empty if they are to run.
    """
    train = this("train", "--steps", str(arguments.steps), "--workload", *workload)
    rows, judged = dict(rows), {}

    def take(name: str, words: list[str], limit_bytes: int | None = limit_bytes) -> dict[str, Any]:
        rows[name] = run(words, limit_bytes, in_cgroup=arguments.cgroup)
        told = {key: value for key, value in rows[name].items() if key != "printed"}
        print(name, json.dumps(told), file=sys.stderr, flush=True)  # the whole way may take hours
        printed: dict[str, Any] = rows[name]["printed"]
        return printed

    if not rows:
        take(IN_CORE[0], train, None)
        take(IN_CORE[1], train)
    in_core = rows[IN_CORE[0]]["printed"]
    for mode in arguments.modes:
        profile, plan = (str(Path(folder) / f"{what}-{mode}.json") for what in ("profile", "plan"))
        timed = ["--iterations", str(arguments.iterations)] if mode != "fake" else []
        take(f"profile {mode}", [*POOCH, "profile", *workload, "--mode", mode, *timed, "-o", profile, "--json"])
        limits = ["--budget", arguments.budget, "--time-limit", str(arguments.plan_s)]
        take(f"plan of {mode}", [*POOCH, "plan", profile, *limits, "-o", plan, "--json"])
        judged[mode] = judged_steps(plan, take(f"steps, plan of {mode}", [*train, "--plan", plan]), in_core)
    return rows, judged


def judged_steps(plan_path: str, planned: dict[str, Any], in_core: dict[str, Any]) -> dict[str, Any]:
    """The planned steps beside those of in-core training without a limit, and beside what the plan promised. Times are
    medians of the steps behind the first ones, from an arena where there is one; of few steps there are none.
    """
    from benchmarks.measured_steps import SETTLED
    from poochplan import Plan

    if not planned or not Path(plan_path).exists():
        return {"bitwise": False}
    plan = Plan.load(plan_path)
    promised = plan.prediction
    found: dict[str, Any] = {
        "bitwise": planned["steps"] == in_core["steps"],
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": promised.arena_peak_bytes if plan.holds_arena else promised.peak_bytes,
        "peak_bytes": planned["peak_bytes"],
        "in_core_peak_bytes": in_core["peak_bytes"],
        "within_budget": planned["peak_bytes"] <= plan.budget_bytes,
        "predicted_step_s": promised.step_s,
    }
    if len(planned["seconds"]) <= SETTLED:
        return found
    step_s, in_core_s = (median(one["seconds"][SETTLED:]) for one in (planned, in_core))
    times = {"step_s": step_s, "in_core_step_s": in_core_s}
    return found | times | {"over_predicted": step_s / promised.step_s, "over_in_core": step_s / in_core_s}


def _shortened(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: row | {"printed": _short(row["printed"])} for name, row in rows.items()}


def _short(printed: dict[str, Any]) -> dict[str, Any]:
    """What of a command's JSON is worth keeping."""
    keys = ("mode", "notes", "in_core_peak_bytes", "peak_bytes", "fallbacks", "budget_bytes", "steps", "seconds")
    return {key: printed[key] for key in keys if key in printed}


# -- cost -------------------------------------------------------------------------------------------------------------


def cost() -> dict[str, Any]:
    """Each profile in a process of its own, one after the other; nothing remembered."""
    rows = {}
    for name, (settings, words) in COSTS.items():
        chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with tempfile.TemporaryDirectory() as folder:
            command = [*POOCH, "profile", GPT2, *chosen, "--mode", "fake", *words]
            command += ["-o", str(Path(folder) / "profile.json.gz"), "--json"]
            found = run(command, environment={"XDG_CACHE_HOME": folder})
            rows[name] = found | {"printed": _short(found["printed"])}
            print(name, found["seconds"], "s", found["largest_resident_bytes"] >> 20, "MiB", found["error"], flush=True)
    return rows


def arguments_of() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        workload=(DEFAULTS[0], "unfit: name of a file in configs/"),
        budget=("50%", "unfit: lower than the limit, for a process needs more than tensors"),
        limit_share=(0.75, "unfit: of what the in-core step needs"),
        steps=(2, "unfit: in-core and planned ones; times are of the fifth and later ones"),
        iterations=(5, "unfit: timed steps of a profile"),
        plan_s=(8.0, "unfit: seconds for a plan"),
        cgroup=(False, "unfit: limit resident memory and page cache by a cgroup, as root"),
    )
    add = parser.add_argument
    add("what", choices=("unfit", "cost", "train", "before"))
    add("--set", action="append", metavar="KEY=VALUE", help=f"unfit (default: {' '.join(DEFAULTS[1])})")
    add("--modes", nargs="+", default=["auto", "fake"], choices=("auto", "fake"), help="unfit: of the profiles")
    add("--in-core", metavar="JSON", help="unfit: take in-core steps and the limit from an earlier run's output")
    add("--plan", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.set = arguments.set or (DEFAULTS[1] if arguments.workload == DEFAULTS[0] else [])
    return arguments


def main() -> int:
    arguments = arguments_of()
    if arguments.what == "train":
        print(json.dumps(train(arguments.workload, arguments.set, arguments.steps, arguments.plan)))
        return 0
    if arguments.what == "before":
        print(json.dumps(before_steps(arguments.workload, arguments.set)))
        return 0
    found = unfit(arguments) if arguments.what == "unfit" else cost()
    print(json.dumps(found, indent=1))
    write_results(arguments.output, facts_of_run(arguments) | {"found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
