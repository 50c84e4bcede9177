"""The GPU tests, and plans beside what else saves memory, on one GPU: step time, memory, exactness, waits.

For ResNet-50, a 3D U-Net and GPT-2, this one also in bfloat16 (whose ops are short enough to show what launching
them takes): in-core; plans with a third and a fifth of the activation memory; swap-all with
prefetch; ``torch.utils.checkpoint`` around every block; ``save_on_cpu`` with pinned memory. An in-core block of steps
runs before and after each, so that a device that gets slower or faster meanwhile tells on both. Results are written
after every one of them, so that a time limit loses little.

    make gpu-suite OUT=folder            # or: PYTHONPATH=src python -m benchmarks.gpu_suite --out folder
    PYTHONPATH=src python -m benchmarks.gpu_suite --out folder --device cpu --tiny --tests residual   # tries the code
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

# Read by torch's allocator and by cuBLAS when they are first used. The first of the allocator's two names goes first.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import poochplan
from benchmarks.facts import Row, facts_of_run, write_results
from benchmarks.gpu_nets import NETS, Net
from benchmarks.gpu_page import page
from benchmarks.pairs import profiled as profile_steps
from benchmarks.plans import part_budget
from poochplan.doctor import Status
from poochplan.doctor_gpu import gpu_findings
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.assembly.assemble import cudnn_version
from poochplan.runtime.devices.opening import usable_device
from poochplan.runtime.devices.pinned import cupy_or_none
from poochplan.runtime.session import Session
from poochplan.verify import check

ROOT = Path(__file__).parent.parent
ALLOCATOR = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ["PYTORCH_ALLOC_CONF"]
"""Its settings: the user's, if there are any."""
WARM_STEPS = 3
"""A session meters its first two."""
LEAST_S = 20.0
"""Nothing is begun with less time than this left."""
PLANS = {"a third": (3, "ilp"), "a fifth": (5, "ilp"), "swap-all": (3, "swap-all")}
"""Part of the activation memory that a plan may take, and its policy."""
RAN_ON = "GPU tests ran on: "
"""Begins the line in which they say so."""
EXACT = ("a fifth",)
"""The plans that are compared bit by bit."""
Enter = Callable[[], contextlib.AbstractContextManager[Any]]
T = TypeVar("T")


class Suite:
    """State: the results so far, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.started_s = time.monotonic()
        self.limit_s = arguments.minutes * 60
        self.where = torch.device(arguments.device)
        self.tiny: bool = arguments.tiny
        self.steps: int = 2 if arguments.tiny else arguments.steps
        self.plan_s: float = arguments.plan_seconds
        self.evaluations = 50 if arguments.tiny else None
        self.path = Path(arguments.out) / "gpu-suite.json"
        self.results: Row = {
            **facts_of_run(arguments),
            "device": device_facts(self.where),
            "doctor": [],
            "tests": None,
            "profiles": [],
            "rows": [],
            "failed": [],
            "skipped": [],
        }

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.started_s)

    def write(self) -> None:
        self.results["took_s"] = round(time.monotonic() - self.started_s, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_results(self.path, self.results)
        self.path.with_suffix(".md").write_text(page(self.results))

    def case(self, name: str, work: Callable[[], T]) -> T | None:
        """What it gives, if there is time for it; what it raises is noted, and the next one goes on."""
        if self.left_s < LEAST_S:
            self.results["skipped"].append(name)
            print(f"{name}: skipped, the time is up", flush=True)
            return None
        begun_s = time.monotonic()
        found: T | None = None
        try:
            found = work()
            print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
        except Exception as error:
            self.results["failed"].append({"case": name, "error": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{name}: FAILED {type(error).__name__}: {error}", flush=True)
        self.write()
        return found

    def add(self, net: str, way: str, row: Row) -> None:
        self.results["rows"].append({"net": net, "way": way, **row})


def device_facts(where: torch.device) -> Row:
    """Which device and driver, and the libraries that only a GPU uses."""
    if where.type != "cuda":
        return {"kind": "cpu", "name": platform.machine()}
    facts = torch.cuda.get_device_properties(where)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    cupy = cupy_or_none()
    return {
        "kind": "cuda",
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(),
        "cupy": None if cupy is None else cupy.__version__,
        "allocator": ALLOCATOR,
    }


def examine(suite: Suite) -> None:
    """``pooch doctor --gpu``, in this process: its findings come first on the page."""
    for one in gpu_findings(suite.where):
        suite.results["doctor"].append({"name": one.name, "status": str(one.status), "found": one.found})
        if one.name == "verdict" and one.status is Status.FAILED:
            raise RuntimeError(f"pooch doctor --gpu: {one.found}")


# -- the tests --------------------------------------------------------------------------------------------------------


def run_tests(suite: Suite, keyword: str) -> None:
    """``tests/gpu`` in a process of its own, for at most 40% of the time; its output lies beside the results.

    They need pytest, which nothing else here does: without it they are left out, and the page says so.
    """
    if importlib.util.find_spec("pytest") is None:
        reason = "left out, for pytest is not installed in this Python (pip install pytest)"
        suite.results["tests"] = {"ended": "left out", "summary": reason, "ran_on": "nothing"}
        print(f"GPU tests: {reason}", flush=True)
        return
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["-k", keyword] if keyword else []
    environment = {**os.environ, "POOCH_GPU_TESTS_DEVICE": suite.where.type, "POOCH_DEEP": "1", "POOCH_PART": ""}
    log = suite.path.with_name("gpu-tests.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=0.4 * suite.limit_s
            )
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "time limit"
    lines = log.read_text().splitlines() or ["no output"]
    ran_on = next((line.removeprefix(RAN_ON) for line in lines if line.startswith(RAN_ON)), "unknown")
    suite.results["tests"] = {"ended": ended, "summary": lines[-1], "ran_on": ran_on}
    if ended != "exit code 0":
        raise RuntimeError(f"GPU tests: {ended}: {lines[-1]}")
    expected = suite.results["device"]["name"] if suite.where.type == "cuda" else suite.where.type
    if ran_on != expected:
        raise RuntimeError(f"GPU tests: expected them to run on {expected}, found {ran_on}; see {log.name}")


# -- measuring --------------------------------------------------------------------------------------------------------


def synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def one_step(net: Net, where: torch.device) -> float:
    """Seconds of one training step, waited for."""
    workload = net.workload
    assert workload.optimizer is not None
    workload.optimizer.zero_grad(set_to_none=True)
    synchronize(where)
    start_s = time.perf_counter()
    workload.step().backward()  # type: ignore[no-untyped-call]
    workload.optimizer.step()
    synchronize(where)
    return time.perf_counter() - start_s


def forget_peaks(where: torch.device) -> None:
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)


def peaks(where: torch.device) -> dict[str, int | None]:
    if where.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(where),
        "reserved_bytes": torch.cuda.max_memory_reserved(where),
    }


def block(suite: Suite, net: Net, enter: Enter) -> tuple[list[float], Row]:
    """Seconds of each timed step within ``enter()``, and the peaks of all of them."""
    forget_peaks(suite.where)
    with enter() as session:
        for _ in range(WARM_STEPS):
            one_step(net, suite.where)
        seconds = [one_step(net, suite.where) for _ in range(suite.steps)]
        found: Row = dict(peaks(suite.where))
        if isinstance(session, Session):
            report = session.report()
            found["metered_peak_bytes"] = report.total.peak_bytes
            last = ("out_bytes", "in_bytes", "replayed_values", "stall_s")
            found |= {name: getattr(report.last_step, name) for name in last}
            found |= {name: getattr(report.total, name) for name in ("fallbacks", "fallback_reasons")}
    return seconds, found


def beside_in_core(suite: Suite, net: Net, enter: Enter) -> Row:
    """Step time, spread and peaks of a way to train, and the step time in-core just before and after it."""
    before, _ = block(suite, net, contextlib.nullcontext)
    seconds, found = block(suite, net, enter)
    after, _ = block(suite, net, contextlib.nullcontext)
    in_core_s = median([*before, *after])
    low, high = np.percentile(seconds, [25, 75])
    return {
        "step_s": median(seconds),
        "spread_s": float(high - low),
        "in_core_step_s": in_core_s,
        "in_core_drift": median(after) / median(before) - 1,
        "overhead": median(seconds) / in_core_s - 1,
        "steps": len(seconds),
        **found,
    }


def bitwise(suite: Suite, name: str, plan: Plan) -> Row:
    """Two steps in-core and under the plan from one start, with deterministic algorithms, compared bit by bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compared = check(lambda: NETS[name](suite.where, suite.tiny).workload, plan, steps=2, timed_steps=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert compared.planned.report is not None
    has_numerics = suite.results["device"]["name"] != "null GPU"  # tests/nullgpu: no kernel computes anything
    return {
        "bitwise_equal": compared.difference is None if has_numerics else None,
        "difference": compared.difference,
        "compared_tensors": compared.compared_tensors,
        "fallbacks": compared.planned.report.total.fallbacks,
    }


# -- ways to train ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpointed(blocks: list[torch.nn.Module]) -> Iterator[None]:
    """Each block's forward runs under ``torch.utils.checkpoint``."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for module in blocks:
        module.forward = wrapped(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in blocks:
            del module.forward  # the class's shows again


def planned(suite: Suite, net: Net, plan: Plan) -> Row:
    """What one plan promised, and what came of it."""
    prediction = plan.prediction
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": max(prediction.peak_bytes, prediction.first_step_peak_bytes),
        "predicted_step_s": prediction.step_s,
        "predicted_overhead": prediction.overhead,
        "predicted_stall_s": prediction.stall_s,
        "solve": {"policy": plan.solve.policy, "gap": plan.solve.gap, "wall_s": plan.solve.wall_s},
        **beside_in_core(suite, net, lambda: poochplan.apply(plan, net.workload.model)),
    }


def run_net(suite: Suite, name: str) -> None:
    plans = compare_ways(suite, name)
    forget_peaks(suite.where)

    def exact(label: str) -> None:
        found = bitwise(suite, name, plans[label])
        suite.add(name, f"{label}, deterministic", found)
        if found["bitwise_equal"] is False:
            raise AssertionError(found["difference"])

    for label in [label for label in EXACT if label in plans]:
        suite.case(f"{name}: {label}, bit by bit", partial(exact, label))


def compare_ways(suite: Suite, name: str) -> dict[str, Plan]:
    """All ways to train one network, on one instance of it; returns the plans."""
    plans: dict[str, Plan] = {}

    def made() -> tuple[Net, Profile]:
        torch.manual_seed(0)
        net = NETS[name](suite.where, suite.tiny)
        return net, profiled(suite, net, name)

    begun = suite.case(f"{name}: profile", made)
    if begun is None:
        return plans
    net, profile = begun
    limits: Row = {"time_limit_s": suite.plan_s, "evaluations": suite.evaluations, "gap": 0.01}

    def under_plan(label: str, divisor: int, policy: str) -> None:
        plans[label] = poochplan.plan(profile, part_budget(profile, divisor), policy=policy, **limits)
        suite.add(name, label, planned(suite, net, plans[label]))

    for label, (divisor, policy) in PLANS.items():
        suite.case(f"{name}: {label}", partial(under_plan, label, divisor, policy))
    others: dict[str, Enter] = {
        "checkpoint": lambda: checkpointed(net.blocks),
        "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=suite.where.type == "cuda"),
    }

    def unplanned(label: str) -> None:
        suite.add(name, label, beside_in_core(suite, net, others[label]))

    for label in others:
        suite.case(f"{name}: {label}", partial(unplanned, label))
    return plans


def profiled(suite: Suite, net: Net, name: str) -> Profile:
    profile = profile_steps(net.workload, name, iterations=3)
    suite.results["profiles"].append(profile_facts(suite, net, name, profile))
    return profile


def profile_facts(suite: Suite, net: Net, name: str, profile: Profile) -> Row:
    """The in-core step: what was profiled, beside what the allocator says of a step without instruments."""
    seconds, found = block(suite, net, contextlib.nullcontext)
    return {
        "net": name,
        "source": net.source,
        "ops": len(profile.ops),
        "saved_values": sum(value.kind == "activation" for value in profile.values),
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "static_bytes": sum(static_bytes(profile).values()),
        "smallest_budget_bytes": smallest_budget(profile),
        "workspace_bytes": max(op.workspace_bytes for op in profile.ops),
        "profiled_step_s": profile.times.step_s,
        "scales": [profile.times.forward_scale, profile.times.backward_scale, profile.times.optimizer_scale],
        "step_s": median(seconds),
        "link": {
            "out_bytes_per_s": profile.link.outward.bandwidth_bytes_per_s,
            "in_bytes_per_s": profile.link.inward.bandwidth_bytes_per_s,
            "duplex": profile.link.duplex,
            "interference": [profile.link.interference_out, profile.link.interference_in],
        },
        "notes": list(profile.notes),
        **found,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for gpu-suite.md, gpu-suite.json and gpu-tests.txt")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not begun by then is left out, and named")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the code")
    parser.add_argument("--tiny", action="store_true", help="tiny networks: its figures mean nothing")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--tests", default="", metavar="KEYWORD", help="only GPU tests of that name (pytest -k)")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each block")
    parser.add_argument("--plan-seconds", type=float, default=10.0, help="time limit of each plan")
    arguments = parser.parse_args(argv)
    usable_device(arguments.device)
    suite = Suite(arguments)
    suite.write()
    if suite.where.type == "cuda":
        suite.case("doctor", lambda: examine(suite))
    if not arguments.no_tests:
        suite.case("GPU tests", lambda: run_tests(suite, arguments.tests))
    for name in arguments.nets:
        run_net(suite, name)
        forget_peaks(suite.where)
    suite.write()
    print(page(suite.results))
    counts = ", ".join(f"{len(suite.results[kind])} {kind}" for kind in ("rows", "failed", "skipped"))
    print(f"{suite.path}: {counts}")
    return 1 if suite.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
