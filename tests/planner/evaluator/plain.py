"""Planning where nothing can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_python(code: str, **environment: str) -> str:
    """What ``code`` prints in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def run_plain(code: str) -> str:
    """The same where there is no compiler, and nothing that one has made."""
    says = "\nfrom poochplan.planner.simulator.evaluator import library\nassert library(None) is None\n"
    with tempfile.TemporaryDirectory() as folder:
        return run_python(textwrap.dedent(code) + says, XDG_CACHE_HOME=folder, CXX="no-such-compiler")
