"""What a profile says of its model, step and host beside the figures. Never the host's name, nobody else's business."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from poochplan.formats.files import package_version
from poochplan.formats.profile import Host, Kind, Memory, RuntimeCost, StepFacts
from poochplan.profiler.capture.capture import Capture
from poochplan.runtime.compiled.inductor import why_none_deferred, written_replays
from poochplan.units import format_bytes

from .values import value_names

EVAL_MODE = "the model was in eval mode: no dropout, no batch statistics"

SWAPPED = (
    "every saved value was on the host while profiling: step times are estimates, of steps that swap everything "
    "less the time in which they swapped"
)


def model_notes(model: torch.nn.Module) -> list[str]:
    """Whether the model, or a part of it, was in eval mode."""
    resting = [(name, module) for name, module in model.named_modules() if not module.training]
    if not resting:
        return []
    if len(resting) == sum(1 for _ in model.modules()):
        return [EVAL_MODE]
    name, module = resting[0]
    first = f"{name} ({type(module).__name__})" if name else "the model itself"
    return [f"modules in eval mode: {len(resting)}, first {first}: no dropout, no batch statistics there"]


def capture_notes(model: torch.nn.Module, where: torch.device) -> list[str]:
    """Why the backwards of compiled modules are no more than one op each, where they could be several."""
    why = why_none_deferred(model, where.type)
    return [f"compiled backwards have all that they saved brought back at once: {why}"] if why else []


def step_facts(model: torch.nn.Module, capture: Capture) -> StepFacts:
    """How the captured step was run."""
    modules = list(model.modules())
    return StepFacts(
        modules=len(modules),
        eval_modules=sum(not module.training for module in modules),
        checkpointed=tuple(capture.checkpointed),
        garbage_bytes=sum(capture.values[number].size_bytes for number in capture.garbage),
        kept_bytes=sum({key: size for _, _, parts in capture.kept for key, size in parts.items()}.values()),
        unmeasured_regions=capture.compiled_calls.unmeasured,
        graph_mode=written_replays(model) is not None,
        unmeasured_ops=capture.unmeasured_ops if capture.memory is Memory.ALLOCATED else 0,
    )


def kept_notes(capture: Capture) -> list[str]:
    """Which saved tensors no plan decides about."""
    if not capture.kept:
        return []
    sizes: dict[int, int] = {}
    for _, _, parts in capture.kept:
        sizes |= parts
    kind, layer, _ = capture.kept[0]
    return [
        f"saved tensors that are sparse, nested or of a subclass are always kept: {format_bytes(sum(sizes.values()))} "
        f"in {len(capture.kept)}, first {kind} in {layer or 'the step, outside the model'}"
    ]


def garbage_notes(capture: Capture, kinds: dict[int, Kind]) -> list[str]:
    """Which values of the step only Python's garbage collector has freed."""
    if not capture.garbage:
        return []
    first = min(capture.garbage)
    size_bytes = sum(capture.values[number].size_bytes for number in capture.garbage)
    layer = capture.values[first].layer
    return [
        f"values that only Python's garbage collector frees: {len(capture.garbage)} ({format_bytes(size_bytes)}), "
        f"first {value_names(capture, kinds)[first]} in {layer or 'the step, outside the model'}; a training loop "
        "holds up to that much more than a plan's budget for each step since the last collection; break the "
        "reference cycle (a closure or an attribute that refers to itself), or call gc.collect() after each step"
    ]


def runtime_notes(cost: RuntimeCost | None) -> list[str]:
    """What of the launching thread's seconds could not be measured."""
    if cost is None or not cost.unmeasured:
        return []
    return [
        f"of what the launching thread takes, {', '.join(cost.unmeasured)} could not be told from 0 and counts as 0; "
        "profile again on a quieter machine"
    ]


def this_host() -> Host:
    """Processor, system and cores of this machine."""
    return Host(processor=processor_name(), system=platform.system(), cores=os.cpu_count() or 0)


def versions_here(device: str) -> dict[str, str]:
    """Of poochplan, torch and python; on the device ``"cuda"`` also of CUDA and cuDNN."""
    versions = {"poochplan": package_version(), "torch": str(torch.__version__), "python": platform.python_version()}
    if device == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return versions


def processor_name() -> str:
    """The model as the kernel knows it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()
