"""Checks of the software: torch and its CUDA, CuPy, the solvers, and what is compiled on first use."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from poochplan.errors import NativeError
from poochplan.formats.files import package_version
from poochplan.native.native_build import NativeBuild
from poochplan.planner.simulator.evaluator import EVALUATOR
from poochplan.runtime.allocator.building import ALLOCATOR

from .finding import Finding, Status, judged

TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14")
"""What the tests of the runtime have passed on, from the oldest that ``pyproject.toml`` allows; the suite on 2.13."""
Versions = Callable[[str], str | None]
"""The installed version of a package by its name on the index; None where there is none."""


def software_findings(*, builds: bool = False) -> Iterator[Finding]:
    """All of them; with ``builds`` what is compiled is built first, which takes seconds."""
    yield Finding(
        name="poochplan", status=Status.OK, found=f"{package_version()} on Python {platform.python_version()}"
    )
    yield torch_version(str(torch.__version__))
    yield cuda(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.version.cuda)
    yield cupy(torch.version.cuda if torch.cuda.is_available() else None, installed)
    yield solvers(installed)
    yield compiled_part(EVALUATOR, "plans are found with some hundred times fewer simulations", builds=builds)
    yield compiled_part(ALLOCATOR, "everything else works", builds=builds)


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_version(found: str) -> Finding:
    """Against those that are tested, whatever their last number."""
    is_tested = ".".join(found.split(".")[:2]) in TESTED_TORCH
    tested = f"{TESTED_TORCH[0]} to {TESTED_TORCH[-1]}"
    advice = f"tested with torch {tested}; check a plan with pooch run --check, and report what differs"
    return judged("torch", is_tested, found, advice)


def cuda(devices: int, built_for: str | None) -> Finding:
    """Whether there is a GPU that torch can use."""
    if devices:
        return Finding(name="CUDA", status=Status.OK, found=f"{devices} devices, torch built for CUDA {built_for}")
    found = f"torch is built for CUDA {built_for}, and finds no device" if built_for else "torch is built without it"
    return Finding(name="CUDA", status=Status.OK, found=f"{found}: profiles and runs are of the CPU")


def cupy(torch_cuda: str | None, versions: Versions) -> Finding:
    """CuPy queues copies with the least work for the launching thread; it has to be for torch's CUDA."""
    if torch_cuda is None:
        return Finding(name="CuPy", status=Status.OK, found="not needed without a GPU")
    wanted = f"cuda{torch_cuda.partition('.')[0]}"
    there = {name: found for name in ("cuda12", "cuda13") if (found := versions(f"cupy-{name}x"))}
    if wanted in there and len(there) == 1:
        return Finding(name="CuPy", status=Status.OK, found=f"cupy-{wanted}x {there[wanted]}, as torch's CUDA")
    if not there:
        found = f"none; torch has CUDA {torch_cuda}"
    else:
        names = ", ".join(f"cupy-{name}x {text}" for name, text in there.items())
        found = f"{names}, where torch has CUDA {torch_cuda}"
    others = "".join(f"pip uninstall cupy-{name}x; " for name in there if name != wanted)
    return judged("CuPy", False, found, f"{others}pip install 'poochplan[{wanted}]': it queues copies faster")


def solvers(versions: Versions) -> Finding:
    """HiGHS proves bounds; PuLP brings CBC, which does without."""
    pulp, highs = versions("pulp"), versions("highspy")
    found = ", ".join(f"{name} {text}" for name, text in (("highspy", highs), ("pulp", pulp)) if text) or "none"
    if pulp and highs:
        return Finding(name="solvers", status=Status.OK, found=found)
    if pulp:
        return judged("solvers", False, found, "pip install highspy: plans are nearer to their bound, and sooner")
    return Finding(
        name="solvers", status=Status.MISSING, found=found, advice="pip install pulp highspy: planning needs them"
    )


def compiled_part(part: NativeBuild, without: str, *, builds: bool = False) -> Finding:
    """Whether it is built, or what would build it; ``without`` it that is so. Where it was asked for it is built here,
    and missing if that fails.
    """
    if builds:
        try:
            part.build()
        except NativeError as error:
            advice = f"see that line; without it {without}"
            return Finding(name=part.name, status=Status.MISSING, found=str(error), advice=advice)
    if part.is_built():
        return Finding(name=part.name, status=Status.OK, found=f"built: {part.file().parent.name}")
    reason = part.why_unavailable()
    if not reason:
        found = f"not built yet; {part.compiler_name()} will do it on first use, or pooch doctor --build now"
        return Finding(name=part.name, status=Status.OK, found=found)
    found, _, advice = reason.partition("; ")
    return judged(part.name, False, found, f"{advice}; without it {without}")
