"""The checks of ``pooch doctor``: the machine, the software and a workload. Each check returns a finding."""

from __future__ import annotations

import platform
import shutil
import sys
import timeit
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from poochplan.errors import NativeError, SpillError
from poochplan.formats.files import cache_folder, package_version
from poochplan.formats.queries import link_line
from poochplan.native import NativeBuild, check_makeable, is_noexec
from poochplan.planner.simulator.evaluator import EVALUATOR
from poochplan.planner.sweep import usable_processors
from poochplan.profiler.assembly.assemble import model_notes, this_host
from poochplan.profiler.capture.node_ops import name_of
from poochplan.profiler.fake.fake_profile import beside_static, step_without_memory
from poochplan.profiler.link import measure_link
from poochplan.profiler.live.step_function import StepFunction
from poochplan.runtime.arena.library import ALLOCATOR
from poochplan.runtime.devices.backend import accelerator_type
from poochplan.runtime.devices.cpu import choose_spill_dir, file_system_type
from poochplan.runtime.replays.compiled_tape import TAPE
from poochplan.tensors.host_memory import available_and_limit, available_bytes, io_limits
from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.tensor_internals import intercept_autograd, nodes_behind
from poochplan.units import format_bytes
from poochplan.workload import Workload

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COPIED_BYTES = (4 << 20, 16 << 20)
LEAST_FREE_BYTES = 4 << 30
ROUNDS, ROUND_S = 30, 0.005
MUCH_SPREAD = 0.2
"""Largest spread of the same work, as a share of its median, at which times of short steps are useful."""
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Versions on which the runtime's tests pass, from the oldest that ``pyproject.toml`` allows. The suite uses 2.13."""
Versions = Callable[[str], str | None]
"""Returns the installed version of a package by its name on the index; None if it is not installed."""
OTHER_FORMULAS = ("Prod", "LinalgLstsq", "LinalgPinv")
"""The operators of torch's database whose results or gradients have other bits under a dispatch mode."""


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but more slowly or with fewer features than possible."""
    MISSING = "missing"
    """Something is impossible without it."""
    FAILED = "failed"
    """It was tried, and did not do what it must."""


class Finding(msgspec.Struct, frozen=True):
    """The subject of a check, its result, and what to do."""

    name: str
    found: str
    status: Status = Status.OK
    advice: str = ""
    """Empty if there is nothing to do."""


def judged(name: str, is_fine: bool, found: str, advice: str, otherwise: Status = Status.WARNING) -> Finding:
    """A finding without a problem if ``is_fine``, else one with its advice."""
    return Finding(name, found) if is_fine else Finding(name, found, otherwise, advice)


def machine_findings(spill_dir: str | Path | None) -> Iterator[Finding]:
    """All findings on the machine. The spill disk is written to, for a second."""
    yield system()
    yield threads(torch.get_num_threads(), usable_processors())
    left_bytes, limit = available_and_limit()
    yield Finding("memory", f"{format_bytes(left_bytes)} free for this process, by the limit of {limit}")
    yield huge_pages(HUGE_PAGES.read_text(encoding="utf-8") if HUGE_PAGES.exists() else "")
    yield spill_disk(spill_dir)
    yield disk_rate(io_limits())
    yield caches(cache_folder())
    yield noise(_rounds_s())


def system() -> Finding:
    """Profiling and running need Linux."""
    host = this_host()
    found = f"{host.system}, {host.processor}"
    advice = "profile and run on Linux; plans can be made here"
    return judged("system", sys.platform.startswith("linux"), found, advice, Status.MISSING)


def threads(used: int, cores: int) -> Finding:
    """Torch's threads against the cores that this process may use."""
    advice = f"set OMP_NUM_THREADS={cores}: threads that wait for each other slow every op"
    return judged("threads", used <= cores, f"torch computes with {used}, this process may use {cores} cores", advice)


def huge_pages(setting: str) -> Finding:
    """Checks the kernel's setting. In a session each tensor of 1 MiB or more is fresh memory, slow in small pages.

    ``setting`` is the kernel's line, with the chosen word in brackets; empty if the kernel gives none.
    """
    chosen = setting.partition("[")[2].partition("]")[0]
    fine = {"always": "always", "madvise": "on request, which the compiled allocator makes"}
    if chosen in fine:
        return Finding("huge pages", fine[chosen])
    found = chosen or "the kernel gives no setting"
    advice = f"echo madvise | sudo tee {HUGE_PAGES}; without them fresh memory takes up to half of a step on the CPU"
    return judged("huge pages", False, found, advice)


def spill_disk(spill_dir: str | Path | None) -> Finding:
    """Checks the folder of values swapped on the CPU: its free space, and the link to a file in it."""
    try:
        where = choose_spill_dir(spill_dir)
        free_bytes = shutil.disk_usage(where).free
        link = measure_link(torch.device("cpu"), where, sizes=COPIED_BYTES)
    except (SpillError, OSError) as error:
        advice = "name a folder on a disk by --spill-dir or POOCH_SPILL_DIR; nothing is swapped on the CPU without"
        return Finding("spill disk", " ".join(str(error).split()), Status.MISSING, advice)
    kind, free = file_system_type(where) or "unknown", format_bytes(free_bytes)
    found = f"{where} ({kind}), {free} free; page cache included, {link_line(link)}"
    return judged("spill disk", free_bytes >= LEAST_FREE_BYTES, found, "make room there, or name another --spill-dir")


def disk_rate(limits: Collection[str]) -> Finding:
    """Whether cgroups limit the rate of a disk. The page cache hides that from a short measurement."""
    found = ", ".join(limits) or "no cgroup of this process limits it"
    advice = "if that is the spill disk, give profile and auto the limit as throttle: a short measurement misses it"
    return judged("disk rate", not limits, found, advice)


def caches(folder: Path) -> Finding:
    """Whether plans, measurements and compiled parts can be kept in the user's cache folder, and loaded from there."""
    advice = "set XDG_CACHE_HOME to another folder: else every run measures this machine and plans anew, uncompiled"
    try:
        check_makeable(folder / "native")
    except NativeError as error:
        return judged("caches", False, str(error).partition("; ")[0], advice)
    if is_noexec(folder):
        return judged("caches", False, f"{folder} is mounted noexec: what is compiled there cannot be loaded", advice)
    return Finding("caches", str(folder))


def noise(rounds_s: list[float]) -> Finding:
    """Checks the spread of the same work over rounds, from the seconds of each."""
    low_s, middle_s, high_s = np.percentile(rounds_s, [25, 50, 75])
    spread, worst = (high_s - low_s) / middle_s, max(rounds_s) / middle_s
    found = f"times of the same work spread by {spread:.0%} (quartiles); the longest is {worst:.1f} times the median"
    advice = "profile when nothing else runs, or with more --iterations: times of a busy machine make poor plans"
    return judged("noise", bool(spread <= MUCH_SPREAD), found, advice)


def _rounds_s() -> list[float]:
    """Seconds of several rounds. Each repeats one matrix product for about 5 ms."""
    factors = torch.ones(256, 256)
    timer, repeats = timeit.Timer(lambda: torch.mm(factors, factors)), 2
    while timer.timeit(repeats) < ROUND_S:
        repeats *= 2
    return timer.repeat(ROUNDS, repeats)


def software_findings(*, builds: bool = False) -> Iterator[Finding]:
    """All findings on the software. With ``builds`` compiled parts are built first, which takes seconds."""
    yield Finding("poochplan", f"{package_version()} on Python {platform.python_version()}")
    yield torch_version(str(torch.__version__))
    yield cuda(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.version.cuda, accelerator_type())
    yield cupy(torch.version.cuda if torch.cuda.is_available() else None, installed)
    yield solvers(installed)
    yield compiled_part(EVALUATOR, builds=builds)
    yield compiled_part(ALLOCATOR, builds=builds)
    yield compiled_part(TAPE, builds=builds)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_version(found: str) -> Finding:
    """Compares torch's version with the tested ones, without the last number."""
    is_tested = ".".join(found.split(".")[:2]) in TESTED_TORCH
    tested = f"{TESTED_TORCH[0]} to {TESTED_TORCH[-1]}"
    advice = f"tested with torch {tested}; check a plan with pooch run --check, and report what differs"
    return judged("torch", is_tested, found, advice)


def cuda(devices: int, built_for: str | None, other: str = "") -> Finding:
    """``other``: the type of an accelerator that is there in its place."""
    if devices:
        return Finding("CUDA", f"{devices} devices, torch built for CUDA {built_for}")
    found = f"torch is built for CUDA {built_for}, and finds no device" if built_for else "torch is built without it"
    return Finding("CUDA", f"{found}: profiles and runs use {f'{other} or ' if other else ''}the CPU")


def cupy(torch_cuda: str | None, versions: Versions) -> Finding:
    """Checks that CuPy is for torch's CUDA. It queues copies with the least work for the launching thread."""
    if torch_cuda is None:
        return Finding("CuPy", "not needed without a GPU")
    wanted = f"cuda{torch_cuda.partition('.')[0]}"
    there = {name: found for name in ("cuda12", "cuda13") if (found := versions(f"cupy-{name}x"))}
    if wanted in there and len(there) == 1:
        return Finding("CuPy", f"cupy-{wanted}x {there[wanted]}, as torch's CUDA")
    names = ", ".join(f"cupy-{name}x {text}" for name, text in there.items())
    found = f"{names}, where torch has CUDA {torch_cuda}" if there else f"none; torch has CUDA {torch_cuda}"
    others = "".join(f"pip uninstall cupy-{name}x; " for name in there if name != wanted)
    return judged("CuPy", False, found, f"{others}pip install 'poochplan[{wanted}]': it queues copies faster")


def solvers(versions: Versions) -> Finding:
    """Checks the solvers. HiGHS proves bounds; CBC, which PuLP includes, does not."""
    pulp, highs = versions("pulp"), versions("highspy")
    found = ", ".join(f"{name} {text}" for name, text in (("highspy", highs), ("pulp", pulp)) if text) or "none"
    if pulp and highs:
        return Finding("solvers", found)
    if pulp:
        return judged("solvers", False, found, "pip install highspy: it plans faster, and nearer to the bound")
    return Finding("solvers", found, Status.MISSING, "pip install pulp highspy: planning needs them")


def compiled_part(part: NativeBuild, *, builds: bool = False) -> Finding:
    """Whether a compiled part is built, why its last build failed, or what would build it. With ``builds`` it is built
    here, and is missing if that fails.
    """
    reason = ""
    if builds:
        try:
            part.build()
        except NativeError as error:
            reason = str(error)
    elif not part.is_built():
        reason = part.why_unavailable() or part.last_failure()
    if reason:
        found, advice = part.reason_and_advice(reason)
        advice = f"{advice}; without it {part.without}"
        return Finding(part.name, found, Status.MISSING if builds else Status.WARNING, advice)
    if part.is_built():
        return Finding(part.name, f"built: {part.file().parent.name}")
    compiler = part.compiler_name()
    return Finding(part.name, f"not built yet; {compiler} will do it on first use, or pooch doctor --build now")


def workload_findings(workload: Workload) -> Iterator[Finding]:
    """All findings on the workload. On the CPU its step runs twice on fake tensors if it can, without side effects."""
    model = workload.model
    every = list(model.parameters())
    where = every[0].device if every else torch.device("cpu")
    count, size_bytes = sum(one.numel() for one in every), sum(one.nbytes for one in every)
    yield Finding("model", f"{type(model).__name__} on {where}, {count:,} parameters ({format_bytes(size_bytes)})")
    yield training(model)
    yield compiled_parts(model)
    nodes: set[str] = set()
    with intercept_autograd(lambda run: _noting(run, nodes)):
        steps = StepFunction(workload.step, model, workload.optimizer, where)
        draft = step_without_memory(steps) if where.type == "cpu" else None
    yield checkpointing(model, draft.facts.checkpointed if draft and draft.facts else ())
    if nodes:  # empty if the step has not run
        yield other_formulas(nodes)
    yield optimizer(workload.optimizer)
    if where.type == "cpu":
        yield memory(beside_static(draft) if draft else None, available_bytes())


def training(model: torch.nn.Module) -> Finding:
    """Whether the model, or a part of it, is in eval mode."""
    notes = model_notes(model)
    return judged("train mode", not notes, notes[0] if notes else "every module", "call model.train() before profiling")


def compiled_parts(model: torch.nn.Module) -> Finding:
    """Lists compiled regions. Plans only decide about their saved values at their edges."""
    found = compiled_modules(model)
    if not found:
        return Finding("compiled parts", "none")
    if "" in found:
        advice = (
            "have poochplan.compile compile it with a plan inside (pooch run --compile), or compile its blocks instead "
            "(block.compile() for each): a plan decides about values between regions"
        )
        return judged("compiled parts", False, "the whole model is one compiled region", advice)
    some = f"{len(found)}, first {', '.join(list(found)[:3])}"
    return Finding("compiled parts", f"{some}; their saved values are swapped or kept, not recomputed")


def checkpointing(model: torch.nn.Module, layers: Sequence[str]) -> Finding:
    """Whether a step checkpoints: modules are set to do so, or ``layers`` ran forward again in backward."""
    modules = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    where = modules or layers
    found = f"on, in {where[0] or 'the model'} and {len(where) - 1} more" if where else "off"
    advice = "switch it off: a plan recomputes values where it pays, and cannot decide about checkpointed parts"
    return judged("activation checkpointing", not where, found, advice)


def other_formulas(nodes: Collection[str]) -> Finding:
    """Lists the step's ``nodes`` that use other formulas under a dispatch mode. Sessions have no mode there."""
    found = sorted(one for one in nodes if one.removeprefix("autograd.").startswith(OTHER_FORMULAS))
    if not found:
        return Finding("under a mode", "no operator of the step is known to have other bits under a dispatch mode")
    other = (
        "torch uses another formula under a dispatch mode of yours, such as a FLOP counter; sessions have none there"
    )
    return Finding("under a mode", f"{', '.join(found)}: {other}")


def _noting(run: Callable[..., Any], nodes: set[str]) -> Callable[..., Any]:
    def noted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nodes.update(name_of(node.name()) for node in nodes_behind(outputs))
        return run(outputs, *args, **kwargs)

    return noted


def optimizer(found: torch.optim.Optimizer | None) -> Finding:
    """Checks the optimizer. Its state is part of every peak, and it should run the step once for an update."""
    if found is None:
        advice = "return it in the Workload: its state is part of the peak that is planned for"
        return judged("optimizer", False, "none", advice)
    advice = "it runs the step several times for one update: each run is planned, but its history is not"
    return judged("optimizer", not isinstance(found, torch.optim.LBFGS), type(found).__name__, advice)


def memory(needed_bytes: int | None, there_bytes: int) -> Finding:
    """Whether the in-core step fits, by a step without memory."""
    if needed_bytes is None:
        return Finding("in-core step", "the step only runs with data; pooch profile measures its memory")
    found = f"takes {format_bytes(needed_bytes)} beside model and data, {format_bytes(there_bytes)} are free"
    return judged("in-core step", needed_bytes < there_bytes, found, "profile it with --mode swap-all, or auto")
