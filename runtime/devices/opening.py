"""Which device a plan runs on: opened for a model, or refused with a clear line."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from poochplan.errors import UsageError

from .accelerator import AcceleratorDevice
from .backend import accelerator_type, check_accelerator
from .cpu import CpuDevice
from .device import ComputeDevice


def usable_device(name: str) -> torch.device:
    """The device of that name (``"cpu"``, ``"cuda:1"``, ``"xpu"``); raises ``UsageError`` if there is none.

    Everything that profiles or runs calls this first, so another system than Linux is refused here.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(
            f"device: expected Linux to profile or run on, found {sys.platform}; profile and run there, plan anywhere"
        )
    try:
        where = torch.device(name)
    except RuntimeError:
        where = torch.device("meta")
    if where.type == "cpu":
        return where  # without a look at the accelerator, which would start its driver
    kind = accelerator_type()
    if where.type not in ("cuda", kind):
        others = f'"{kind}" or "{kind}:N"' if kind else '"cuda" or "cuda:N"'
        raise UsageError(f'device: expected "cpu", {others}, found {name!r}')
    if where.type == "cuda" and kind != "cuda":
        raise UsageError(
            "device: expected a CUDA device, found none that torch can use; profile and plan for cpu, or for a GPU "
            "that is not there with `pooch profile --mode fake --roofline h200` (or v100, a100) and no --device"
        )
    count = torch.cuda.device_count() if kind == "cuda" else torch.accelerator.device_count()
    if (where.index or 0) >= count:
        others = f" to {kind}:{count - 1}" if count > 1 else ""
        raise UsageError(f"device: expected {kind}:0{others}, found {name!r}; name that")
    if kind != "cuda":
        check_accelerator(where)
    return where


def model_device(model: torch.nn.Module, kind: str) -> torch.device:
    """The one device of that kind that has all of the model's parameters.

    Raises ``UsageError`` if there is no such device, if a parameter is elsewhere, or if a buffer is neither there nor
    in host memory.
    """
    asked = usable_device(kind)
    where = None if asked.index is None else asked
    for name, parameter in model.named_parameters():
        where = where or parameter.device
        if parameter.device.type != asked.type or parameter.device != where:
            wanted = kind if where.type != asked.type else str(where)
            raise UsageError(
                f"model: expected every parameter on {wanted}, found {name} on {parameter.device}; {_remedy(parameter)}"
            )
    where = where or asked
    for name, buffer in model.named_buffers():
        if buffer.device.type != "cpu" and buffer.device != where:
            raise UsageError(
                f"model: expected every buffer on {where}, found {name} on {buffer.device}; {_remedy(buffer)}"
            )
    return where


def check_cap(cap_bytes: int | None, where: torch.device) -> None:
    """Raises ``UsageError`` for a limit on a device whose allocator takes none."""
    if cap_bytes is not None and where.type != "cuda":
        raise UsageError(
            f"cap: expected a model on cuda, whose allocator takes a limit, found one on {where.type}; leave it out"
        )


def _remedy(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "build it with data, or for mode fake inside poochplan.profiler.fake.fake.building()"
    return "move the model there"


def open_device(
    where: torch.device,
    spill_dir: str | Path | None = None,
    throttle_bytes_per_s: float | None = None,
    host_limit_bytes: int | None = None,
    *,
    spans: bool = False,
) -> ComputeDevice:
    """The device that runs on ``where``. ``spill_dir`` and the throttle are for the CPU device, the rest is for others.

    Raises ``SpillError`` if the spill directory cannot be used.
    """
    if where.type == "cpu":
        return CpuDevice(spill_dir, throttle_bytes_per_s=throttle_bytes_per_s)
    if where.type != "cuda":
        return AcceleratorDevice(where, host_limit_bytes=host_limit_bytes, spans=spans)
    from .cuda import CudaDevice

    return CudaDevice(where, host_limit_bytes=host_limit_bytes, spans=spans)
