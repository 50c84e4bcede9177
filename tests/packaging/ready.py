"""What `make` says before it begins, and whether this machine can install what the suite needs: in one line, at once.

``about`` says what `make test` does and how long that takes; ``install VENV`` checks disk and packages. Needs nothing
but Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
NEEDED_GIB = {"CPU": 4, "CUDA": 12}
"""Free space for an environment with each build of torch, and for the downloads; 2 and 6 GiB remain."""
SUITE_MINUTES = 5
"""On two idle cores, after the installation: as measured in ``benchmarks/pages/house.md``."""


def about(venv: Path) -> str:
    """What `make test` is about to do here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    minutes = SUITE_MINUTES if cores > 1 else 2 * SUITE_MINUTES
    how = "on two idle cores" if cores > 1 else "on the one core here"
    first = (
        "" if (venv / ".installed").exists() else f"installs torch and others in {venv} (3 to 10 minutes, by network), "
    )
    return (
        f"make test: {first}checks style, types and docs, then runs 3,200 tests in two processes: "
        f"some {minutes} minutes {how}, up to twice as long on slow or busy ones."
    )


def pinned_torch() -> str:
    return next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def why_not(venv: Path) -> str:
    """Why the packages cannot be installed into the environment, and what to do; empty otherwise. Downloads nothing."""
    if any(venv.glob("lib/python3.*/site-packages/torch/version.py")):
        return ""
    quick = "--dry-run", "--no-deps", "--quiet", "--retries", "1", "--timeout", "20", "--report", "-"
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", *quick, pinned_torch()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.sub(r"\s+", " ", (done.stderr.strip().splitlines() or ["it says nothing"])[-1])
        return (
            f"expected {pinned_torch()} from a package index or a folder of wheels, found neither ({said}); "
            "connect to a network, or set PIP_INDEX_URL or PIP_FIND_LINKS"
        )
    (found,) = json.loads(done.stdout)["install"]
    needs = " ".join(found["metadata"].get("requires_dist", []))
    kind = "CUDA" if "nvidia" in needs or "cuda" in needs else "CPU"
    free_bytes = shutil.disk_usage(venv).free
    if free_bytes < NEEDED_GIB[kind] * GIB:
        return (
            f"expected {NEEDED_GIB[kind]} GiB free for {venv} with torch's {kind} build, found "
            f"{free_bytes / GIB:.1f} GiB; free space, or set PIP_FIND_LINKS to a smaller build's folder"
        )
    return ""


def main() -> None:
    """Says what is asked for; ends with 1 where the machine cannot install."""
    what, venv = sys.argv[1], Path(sys.argv[2])
    if what == "about":
        print(about(venv), flush=True)
    elif reason := why_not(venv):
        sys.exit(f"error: {reason}")


if __name__ == "__main__":
    main()
