"""Several processes of this machine, started as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def torchrun(module: str, folder: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """What the processes that torchrun started have written."""
    done = started(module, str(folder), *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def started(
    module: str, *arguments: str, ranks: int = 2, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How torchrun ended, with what its processes have printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run([*command, "-m", module, *arguments], cwd=cwd, **variables)


def run(command: list[str], *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """How the command ended; its processes have one thread each."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=400)
