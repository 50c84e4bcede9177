"""Python in a process of its own, from the root of this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.forks import forked

ROOT = Path(__file__).parents[1]


def python(code: str, *arguments: object, is_fresh: bool = False, **environment: str) -> str:
    """What it prints. Where it fails, the message has its stderr, or else that. ``is_fresh``: torch is not imported."""
    return _ran("ignore", code, arguments, is_fresh, environment).stdout


def stderr_of(code: str, *arguments: object, is_fresh: bool = False, **environment: str) -> str:
    """What it says on stderr, warnings included."""
    return _ran("default", code, arguments, is_fresh, environment).stderr


def _ran(
    warnings: str, code: str, arguments: tuple[object, ...], is_fresh: bool, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **environment}
    start = [sys.executable] if is_fresh else forked()
    command = [*start, "-W", warnings, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr or done.stdout}"
    return done


def without_compiler(code: str) -> str:
    """What code of the planner prints where there is no compiler, and nothing that one has made."""
    says = "\nfrom poochplan.planner.simulator.evaluator import library\nassert library(None) is None\n"
    with tempfile.TemporaryDirectory() as folder:
        return python(textwrap.dedent(code) + says, is_fresh=True, XDG_CACHE_HOME=folder, CXX="no-such-compiler")
