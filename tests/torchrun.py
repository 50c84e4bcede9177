"""Several processes of this machine, started by torchrun or another launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forks import forked

ROOT = Path(__file__).parents[1]


TORCHRUN = ("torch.distributed.run", "--standalone")
FORKED = ("tests.forked_ranks",)
"""Starts what torchrun starts, with one import of torch for all ranks."""


def torchrun(
    module: str, folder: Path, *arguments: str, ranks: int = 2, launcher: Sequence[str] = FORKED
) -> list[dict[str, Any]]:
    """What the ranks that the launcher started have written."""
    done = started(module, str(folder), *arguments, ranks=ranks, launcher=launcher)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def started(
    module: str, *arguments: str, ranks: int = 2, launcher: Sequence[str] = TORCHRUN, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How the launcher ended, with what its processes have printed."""
    counts = {TORCHRUN: ["--nproc-per-node", str(ranks), "-m"], FORKED: [str(ranks)]}
    start = forked() if tuple(launcher) == FORKED else [sys.executable]
    command = [*start, "-m", *launcher, *counts.get(tuple(launcher), ["-m"]), module, *arguments]
    return run(command, cwd=cwd, **variables)


def run(command: list[str], *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """How the command ended; its processes have one thread each."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=400)
