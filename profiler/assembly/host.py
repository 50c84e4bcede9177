"""The host that profiles or runs: processor, system, versions. Never its name, which is nobody else's business."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from poochplan.formats.files import package_version
from poochplan.formats.profile import Host


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
