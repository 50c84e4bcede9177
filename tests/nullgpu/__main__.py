"""``python -m tests.nullgpu COMMAND...``: runs a command on the null GPU, with the Python and the torch of this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .building import built, environment


def main(command: list[str]) -> None:
    if not command:
        sys.exit("usage: python -m tests.nullgpu COMMAND..., such as: python -m tests.nullgpu pytest tests/gpu")
    folder = built()
    os.environ.update(environment(folder, os.environ))
    own = Path(sys.executable).parent / command[0]  # of this environment, if it has one
    program = str(own) if own.exists() else command[0]
    os.execvp(program, [program, *command[1:]])


main(sys.argv[1:])
