"""The request for a profile, checked before anything runs; and memory outside the step that no op of it uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from poochplan.errors import StepError, UsageError, check_choice
from poochplan.formats.profile import Link
from poochplan.runtime.devices.opening import model_device
from poochplan.runtime.metering.census import DataParallel
from poochplan.tensors.storages import own_tensors, parts_of
from poochplan.torch_private.sharding import is_sharded

ProgressCallback = Callable[[str], None]
"""Called with a line of text at each stage of the work."""
STAGES = ("warming up", "capturing", "measuring the link", "timing", "running", "verifying")
"""The beginnings of the texts that ``progress`` is called with, in their order."""
MODES = ("run", "swap-all", "auto", "fake")
_MOST_OBJECTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of :func:`poochplan.profile`, except step, model and mode."""

    workload: str
    iterations: int
    warmup: int
    spill_dir: str | Path | None
    throttle_bytes_per_s: float | None
    link: Link | None
    say: ProgressCallback


def checked_device(model: torch.nn.Module, device: str | None, iterations: int | None, warmup: int) -> torch.device:
    """The device of the model; raises what :func:`poochplan.profile` says."""
    if (iterations is not None and iterations < 1) or warmup < 0:
        raise UsageError(f"iterations and warmup: expected at least 1 and 0, found {iterations} and {warmup}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StepError("model: expected parameters that require gradients, found none; there is nothing to train")
    kinds = (parameter.device.type for parameter in model.parameters())
    return model_device(model, device or next((kind for kind in kinds if kind != "meta"), "cpu"))


def check_whole(model: torch.nn.Module, step: Callable[[], Any]) -> None:
    """Raises ``UsageError`` for a model that FSDP2 shards, unless all ranks run the step together."""
    if is_sharded(model) and not getattr(step, "is_led", False):
        raise UsageError(
            f"model: expected one that FSDP2 does not shard, found {type(model).__name__}: profiling repeats steps, "
            "and ranks would not repeat as many; use poochplan.auto(model, optimizer, budget=...) and its session.plan"
        )


def check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ``UsageError`` for an optimizer whose step cannot be called without a closure, such as LBFGS."""
    if optimizer is None:
        return
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[
        1:
    ]  # a scheduler wraps the bound one
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if parameters and parameters[0].default is inspect.Parameter.empty and parameters[0].kind not in any_number:
        raise UsageError(
            f"optimizer: expected one whose step() needs no closure, found {type(optimizer).__name__}, which runs "
            "forward and backward itself, several times a step; profile without optimizer=, and count its state with "
            "also=[optimizer] once it has taken a step"
        )


def check_mode(
    mode: str,
    backward: str,
    roofline: str | None,
    iterations: int | None,
    where: torch.device,
    throttle: str | float | None,
) -> None:
    """Raises what :func:`poochplan.profile` says about a mode with options that do not belong to it."""
    if mode not in MODES:
        raise UsageError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    if mode not in ("fake", "auto") and roofline is not None:
        raise UsageError(f'roofline: mode "{mode}" measures durations and takes none; drop it, or ask for mode "fake"')
    fake = mode == "fake" or roofline is not None
    if fake and iterations is not None:
        raise UsageError(
            f'iterations: mode "fake" times no steps and takes none, found {iterations}; '
            'leave it out, or ask for mode "run"'
        )
    if fake and where.type != "cpu":
        raise UsageError(f'device: expected a model on the CPU in mode "fake", found one on {where}; build it there')
    if throttle is not None and where.type != "cpu":
        raise UsageError(f"throttle: expected the CPU, found {where}, where copies are not slowed; leave it out")
    check_choice("backward", backward, ("outside", "inside"))
    if backward == "inside" and fake:
        raise UsageError(
            'backward: expected "outside" in mode "fake", which runs no optimizer, found "inside"; return the loss'
        )


def stage_share(text: str) -> float | None:
    """How much of profiling is done when ``progress`` gets that text; None if the text names no stage."""
    return next((place / len(STAGES) for place, begin in enumerate(STAGES) if text.startswith(begin)), None)


def tensors_beside(also: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in each of ``also``. These are modules, optimizers, tensors, containers of these, and other objects
    (a data set, a loader, an average of the weights), which are searched by their attributes.

    A model for data-parallel training has buckets as large as its gradients; a stand-in counts for them.

    Raises
    ------
    UsageError
        It is no list or tuple, or there is no tensor in one of its entries.
    """
    if not isinstance(also, Sequence) or isinstance(also, str):
        raise UsageError(f"also: expected a list of modules, tensors or containers, found {type(also).__name__}")
    found: list[torch.Tensor] = []
    for entry in also:
        inside = list(_tensors_in(entry))
        if not inside:
            raise UsageError(
                f"also: expected modules, tensors or objects that hold tensors, found {type(entry).__name__} in which "
                "there is none; name what holds the memory, or leave it out"
            )
        found += inside
    return found


def _tensors_in(entry: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    pending = [entry]
    while pending and len(seen) < _MOST_OBJECTS:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, type, ModuleType, FunctionType, MethodType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield from parts_of(thing)
            if thing.is_leaf and thing.grad is not None:
                yield from parts_of(thing.grad)
        else:
            if isinstance(thing, DataParallel):  # stand-ins take its buckets' memory while they are held
                parameters = (one for one in thing.parameters() if one.requires_grad)
                yield from (torch.empty_like(one, requires_grad=False) for one in parameters)
            pending.extend(_inside(thing))


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, torch.nn.Module):
        return own_tensors(thing)
    if isinstance(thing, torch.optim.Optimizer):
        return list(thing.state.values())
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return thing
    return list(getattr(thing, "__dict__", {}).values())
