"""What a profile is asked for: checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from poochplan.errors import StepError, UsageError
from poochplan.formats.profile import Link
from poochplan.runtime.devices.opening import model_device

Progress = Callable[[str], None]
STAGES = ("warming up", "capturing", "measuring the link", "timing", "running", "verifying")
"""How the texts begin that ``progress`` is called with, in their order."""
MODES = ("run", "swap-all", "auto", "fake")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`poochplan.profile` was asked for, beside step, model and mode."""

    workload: str
    iterations: int
    warmup: int
    spill_dir: str | Path | None
    throttle_bytes_per_s: float | None
    link: Link | None
    say: Progress


def checked_device(model: torch.nn.Module, device: str | None, iterations: int | None, warmup: int) -> torch.device:
    """Where the model is; raises what :func:`poochplan.profile` says."""
    if (iterations is not None and iterations < 1) or warmup < 0:
        raise UsageError(f"iterations and warmup: expected at least 1 and 0, found {iterations} and {warmup}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StepError("model: expected parameters that require gradients, found none; there is nothing to train")
    return model_device(model, device or _kind(model))


def _kind(model: torch.nn.Module) -> str:
    """The kind of device of the first parameter that is on a usable one."""
    kinds = [parameter.device.type for parameter in model.parameters()]
    return next((kind for kind in kinds if kind in ("cpu", "cuda")), "cpu")


def check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ``UsageError`` for an optimizer whose step cannot be called without a closure, such as LBFGS."""
    if optimizer is None:
        return
    parameters = list(inspect.signature(optimizer.step).parameters.values())
    if parameters and parameters[0].default is inspect.Parameter.empty and parameters[0].kind not in _ANY_NUMBER:
        raise UsageError(
            f"optimizer: expected one whose step() needs no closure, found {type(optimizer).__name__}, which runs "
            "forward and backward itself, several times a step; profile without optimizer=, and count its state with "
            "also=[optimizer] once it has taken a step"
        )


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_mode(
    mode: str, roofline: str | None, iterations: int | None, where: torch.device, throttle: str | float | None
) -> None:
    """Raises what :func:`poochplan.profile` says of a mode with options that are not for it."""
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
        raise UsageError(f'device: mode "fake" takes the ops of the CPU, found a model on {where}; build it on the CPU')
    if throttle is not None and where.type != "cpu":
        raise UsageError(f"throttle: copies of {where} are not held to a rate; leave it out, or profile on the CPU")


def check_backward(backward: str, mode: str, roofline: str | None) -> None:
    """Raises what :func:`poochplan.profile` says of a step that calls backward itself in a mode that cannot be."""
    if backward not in ("outside", "inside"):
        raise UsageError(f'backward: expected "outside" or "inside", found {backward!r}')
    if backward == "inside" and (mode == "fake" or roofline is not None):
        raise UsageError(
            'backward: a step without memory cannot step an optimizer; return the loss, and leave out backward="inside"'
        )


def stage_share(text: str) -> float | None:
    """How much of profiling is behind the stage that ``progress`` was told of; None where the text is of none."""
    return next((place / len(STAGES) for place, begin in enumerate(STAGES) if text.startswith(begin)), None)
