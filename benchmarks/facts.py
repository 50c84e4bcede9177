"""What a results file says about the run that made it: commit, versions, machine, arguments."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "pulp", "highspy")


def facts_of_run(arguments: argparse.Namespace, packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Commit (with ``+`` when tracked files differ from it), versions of ``packages``, processor, and the arguments."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
        "arguments": {name: value for name, value in vars(arguments).items() if name != "output"},
    }


def write_results(path: str | Path | None, found: Any) -> None:
    """Writes what was found as JSON, where a path is given."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def _commit() -> str:
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("POOCH_COMMIT", "unknown")  # a copy without its history is told


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
