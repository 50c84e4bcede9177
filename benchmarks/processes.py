"""Work in a process of its own: a function that is forked or begins anew, or a script that answers in its last line."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

IMPORTED = ("torch", "torch._dynamo", "monai.networks.nets", "transformers", "poochplan.workload")
"""All that building a workload and training it may import."""
POOCH = [sys.executable, "-c", "import sys; from poochplan.cli import main; sys.exit(main())"]
"""The command ``pooch``, in the Python that runs this."""


def import_all() -> None:
    for module in IMPORTED:
        importlib.import_module(module)


def in_a_process(function: Callable[..., Any], *arguments: object, start: str = "fork") -> Any:
    """What it returns, in a process that ends with it. ``start``: as of multiprocessing; ``spawn`` imports anew."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as process:
        return process.submit(function, *arguments).result()


def answer_of(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``python -m module`` says in its last line, a JSON object; one that fails ends this process.

    ``environment`` is beside that of this process.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    given = dict(os.environ) | dict(environment or {})
    done = subprocess.run(command, env=given, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
