"""The checks of ``pooch doctor --gpu``: what a plan needs of one GPU, tried on it. Each check returns a finding.

A check that fails names what sessions do in its place, by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

from poochplan.doctor import Finding, Status, judged
from poochplan.errors import named_line
from poochplan.formats.plan import Decision
from poochplan.formats.queries import link_line, saved_values
from poochplan.profiler.capture.clock import DeviceClock, current
from poochplan.profiler.link import measure_link
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.step.preserve import kept_generators, restored
from poochplan.profiler.trials.compare import instructions_for, under
from poochplan.profiler.trials.machine_facts import measure_runtime
from poochplan.runtime.devices.backend import backend_of
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.pinned import PinnedMemory, cupy_or_none, fitting_cupy
from poochplan.runtime.devices.transfers import copy_out
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.step_policies.follow import AlwaysFollow
from poochplan.torch_private.cuda_internals import allocator_settings, cudnn_versions, gpu_sleep
from poochplan.units import format_bytes, format_seconds

PINNED_BYTES = 64 << 20
LINK_SIZES_BYTES = (4 << 20, 32 << 20)
SLOW_BYTES_PER_S = 6e9
"""Half of what PCIe 3 with 16 lanes gives."""
OTHERS_BYTES = 1 << 30
"""More than a context and libraries take."""
LEAST_OVERLAP = 0.5
"""Of the shorter of a copy and a kernel, the share in which both run, if copies run beside compute at all."""
_REPEATS = 5
_FIRST_CYCLES = 4_000_000
_SENTINEL = -1.0
WAYS = {
    "keep": (Decision.KEEP,),
    "swap": (Decision.SWAP,),
    "recompute": (Decision.RECOMPUTE,),
    "mixed": (Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE),
}
Check = Callable[[torch.device], Finding]


def gpu_findings(where: torch.device) -> Iterator[Finding]:
    """All findings on that GPU, and the verdict in one line. It computes and copies for some seconds."""
    where, found = backend_of(where).where, list[Finding]()
    for check in (gpus, others, versions, cupy, pinning, link, events, overlap, bits, allocator, launches):
        with current(where):
            found.append(_tried(check, where))
        yield found[-1]
    yield verdict(found)


def _tried(check: Check, where: torch.device) -> Finding:
    """Its finding. What it raises is one too: a GPU fails in many ways."""
    try:
        return check(where)
    except Exception as error:
        advice = "sessions stand aside at such an error, and the loop goes on"
        return Finding(check.__name__, named_line(error), Status.FAILED, advice)


def verdict(found: Sequence[Finding]) -> Finding:
    """One line about all of them."""
    bad = ", ".join(one.name for one in found if one.status in (Status.FAILED, Status.MISSING))
    rest = ", ".join(one.name for one in found if one.status is Status.WARNING)
    if bad:
        advice = "each of these lines names what is done in its place"
        return Finding("verdict", f"failed: {bad}", Status.FAILED, advice)
    return judged("verdict", not rest, f"usable, but look at: {rest}" if rest else "usable", "see these lines")


# -- what is there ----------------------------------------------------------------------------------------------------


def gpus(where: torch.device) -> Finding:
    """Which GPU is checked, and whether there are others."""
    facts, count = torch.cuda.get_device_properties(where), torch.cuda.device_count()
    found = f"{where}: {facts.name}, {format_bytes(facts.total_memory)}"
    several = f"{found}; {count} GPUs are visible, of which only this one was checked"
    advice = "one plan is for one GPU: check each by --device cuda:N, or start one rank for each"
    return judged("GPU", count == 1, found if count == 1 else several, advice)


def others(where: torch.device) -> Finding:
    """Memory that neither torch nor a context of this process accounts for."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(where)
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(where)
    found = f"{format_bytes(free_bytes)} free, {format_bytes(outside_bytes)} taken outside of this process's torch"
    advice = (
        "nvidia-smi names the processes; auto and budgets in percent count on what is free, a budget in bytes does not"
    )
    return judged("GPU memory", outside_bytes <= OTHERS_BYTES, found, advice)


def versions(where: torch.device) -> Finding:
    """Whether torch, the driver and cuDNN are for each other."""
    built, cudnn, driver = str(torch.version.cuda), cudnn_versions(), _driver_version()
    found = f"torch for CUDA {built}, driver for CUDA {driver or 'unknown'}"
    if cudnn is not None:
        here, wanted = (".".join(map(str, one)) for one in cudnn)
        found += f", cuDNN {here}"
        if cudnn[0][0] != cudnn[1][0] or cudnn[0][1] < cudnn[1][1]:
            advice = (
                "take the other cuDNN out of LD_LIBRARY_PATH; until then torch.backends.cudnn.enabled = False "
                "does without"
            )
            return Finding("versions", f"{found}, where torch was built with {wanted}", Status.FAILED, advice)
    fits = driver is None or int(driver.partition(".")[0]) >= int(built.partition(".")[0])
    advice = "update the driver, or install a torch for its CUDA"
    return judged("versions", fits, found, advice, Status.FAILED)


def _driver_version() -> str | None:
    """The newest CUDA that the driver knows; None if the runtime is not found by its name."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        if library.cudaDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return None


def cupy(where: torch.device) -> Finding:
    """Whether CuPy queues the copies."""
    there = fitting_cupy(cupy_or_none(), where)
    if there is not None:
        return Finding("copies by", f"CuPy {there.__version__}")
    found = "the CUDA runtime that torch has loaded: there is no CuPy, or it does not work here"
    wanted = f"pip install 'poochplan[cuda{str(torch.version.cuda).partition('.')[0]}]'"
    return judged("copies by", False, found, f"{wanted}; without it a copy takes some microseconds more to queue")


def allocator(where: torch.device) -> Finding:
    """How the caching allocator is set."""
    backend, settings = torch.cuda.get_allocator_backend(), allocator_settings()
    text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "the default")
    if not settings:
        return Finding("allocator", f"{backend}; this torch does not tell its settings")
    found = f"{backend}, {text}; expandable segments {'on' if settings.get('expandable_segments') else 'off'}"
    fine = backend != "native" or bool(settings.get("expandable_segments"))
    advice = "set PYTORCH_ALLOC_CONF=expandable_segments:True: else fragments take memory beside the budget"
    return judged("allocator", fine, found, advice)


# -- copies and events ------------------------------------------------------------------------------------------------


def pinning(where: torch.device) -> Finding:
    """Whether the driver pins host memory."""
    start_s = time.perf_counter()
    try:
        PinnedMemory(PINNED_BYTES, fitting_cupy(cupy_or_none(), where)).free()
    except OSError as error:
        advice = (
            "raise the container's limit of locked memory (ulimit -l); swapped values lie in pageable memory instead, "
            "whose copies are slower and hold up the launching thread"
        )
        return Finding("pinning", error.strerror or str(error), Status.FAILED, advice)
    return Finding("pinning", f"{format_bytes(PINNED_BYTES)} in {format_seconds(time.perf_counter() - start_s)}")


def link(where: torch.device) -> Finding:
    """Rates of copies both ways."""
    there = measure_link(where, sizes=LINK_SIZES_BYTES)
    fine = min(there.outward.bandwidth_bytes_per_s, there.inward.bandwidth_bytes_per_s) >= SLOW_BYTES_PER_S
    advice = "look at the slot's lanes (nvidia-smi -q -d PERFORMANCE,PCIE); plans count on the measured rates"
    return judged("link", fine, link_line(there), advice)


def events(where: torch.device) -> Finding:
    """Whether an event comes when its work has ended, and not before."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(where)
    begin.record()
    gpu_sleep(_FIRST_CYCLES, where)
    end.record()
    was_early = bool(end.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(where)
    took_s = begin.elapsed_time(end) / 1e3
    if was_early:
        advice = "unset CUDA_LAUNCH_BLOCKING; steps are exact, and no copy runs beside compute"
        found = "an event came as soon as it was recorded: launches wait for their end"
        return Finding("events", found, Status.FAILED, advice)
    return Finding("events", f"a kernel of {format_seconds(took_s)} was waited for")


def overlap(where: torch.device) -> Finding:
    """How much of a copy runs while the GPU computes."""
    device = open_device(where)
    try:
        device.reserve_host(PINNED_BYTES)
        share = _overlap(device)
    finally:
        device.close()
    found = f"{share:.0%} of a copy of {format_bytes(PINNED_BYTES)} ran beside a kernel"
    advice = (
        "unset CUDA_LAUNCH_BLOCKING, and look for a limit on streams (CUDA_DEVICE_MAX_CONNECTIONS=1); steps are exact, "
        "and wait for each copy: a larger budget has fewer"
    )
    return judged("overlap", share >= LEAST_OVERLAP, found, advice, Status.FAILED)


def _overlap(device: ComputeDevice) -> float:
    storage, cycles, clock = device.allocate(PINNED_BYTES), _FIRST_CYCLES, DeviceClock(device.where)

    def copied() -> None:
        copy_out(device, storage, 0).wait()

    def beside() -> None:
        copy = copy_out(device, storage, 0)
        gpu_sleep(cycles, device.where)
        copy.wait()

    def seconds(work: Callable[[], object]) -> float:
        times_s = []
        for _ in range(_REPEATS):
            clock.synchronize()
            begin = clock.mark()
            work()
            end = clock.mark()
            clock.synchronize()
            times_s.append(clock.seconds(begin, end))
        return median(times_s)

    copy_s = seconds(copied)
    cycles = max(1, int(cycles * copy_s / seconds(partial(gpu_sleep, cycles, device.where))))
    kernel_s = seconds(partial(gpu_sleep, cycles, device.where))
    return max(0.0, min(1.0, (copy_s + kernel_s - seconds(beside)) / min(copy_s, kernel_s)))


# -- bits and microseconds --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Products, a norm, a nonlinearity and dropout, so that replays need a generator's state."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(blocks)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + block(rows)
        return rows


def bits(where: torch.device) -> Finding:
    """Gradients in-core against those under plans that keep, swap, recompute and mix, bit by bit."""
    computes = has_numerics(where)
    with restored(kept_generators()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a value that cannot be recomputed, and of memory that is not pinned
        differing = list(_differing(where))
    found = ", ".join(("in-core", *WAYS))
    if not computes:
        reason = f"not checked: no numerics (a kernel left its output as it was); {found} ran"
        return judged("bits", False, reason, "this GPU computes nothing: only bytes and order can be told on it")
    advice = (
        "set CUBLAS_WORKSPACE_CONFIG=:4096:8, and report it; auto and apply compare values as they come back (on_audit)"
    )
    found = f"differ from in-core: {', '.join(differing)}" if differing else f"{found}: gradients are equal"
    return judged("bits", not differing, found, advice, Status.FAILED)


def has_numerics(where: torch.device) -> bool:
    """Whether a kernel writes its output. Raises ``ArithmeticError`` if it writes a wrong product of whole numbers."""
    numbers = torch.arange(16, dtype=torch.float32, device="cpu").reshape(4, 4)
    there, product = numbers.to(where), torch.full((4, 4), _SENTINEL, device="cpu").to(where)
    torch.mm(there, there, out=product)
    found = product.cpu()
    if torch.equal(found, numbers @ numbers):
        return True
    if torch.equal(found, torch.full_like(found, _SENTINEL)):
        return False
    raise ArithmeticError("a product of small whole numbers is wrong")


def _differing(where: torch.device) -> Iterator[str]:
    """The ways whose gradients are not those of the first step; a second step without the engine is one of them."""
    torch.manual_seed(0)
    model = Blocks().to(where)
    rows = torch.randn(128, 64, device="cpu").to(where)

    def forward() -> torch.Tensor:
        model.zero_grad()
        result: torch.Tensor = model(rows).square().mean()
        return result

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        forward().backward()  # type: ignore[no-untyped-call]
        return [one.grad.cpu() for one in model.parameters() if one.grad is not None]

    with StepFunction(forward, model, None, where) as steps:
        profile = steps.run(Capturing(steps.context)).untimed("run")
    wanted = gradients()
    if not _equal(gradients(), wanted):
        yield "in-core itself"
    count = len(saved_values(profile))
    for name, way in WAYS.items():
        instructions = instructions_for(profile, list(itertools.islice(itertools.cycle(way), count)))
        device = open_device(where)
        try:
            engine = Engine(AlwaysFollow(instructions), device, model)
            with under(engine, model, *engine.planned.before(engine.pack, engine.unpack)):
                found = gradients()
        finally:
            device.close()
        if not _equal(found, wanted):
            yield name


def _equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Of copies on the host, whose bytes are compared there."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, wanted, strict=True)
    )


def launches(where: torch.device) -> Finding:
    """Microseconds of the launching thread, on a small network."""
    with restored(kept_generators()):
        cost = measure_runtime(where).cost
    parts = {"launched op": cost.launch_s, "recorded op": cost.record_s, "replayed op": cost.replay_s}
    parts |= {"saved handle": cost.handle_s, "swapped value": cost.swap_s}
    return Finding("launching thread", ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in parts.items()))
