"""Does the in-core step fit into what memory is left? And what is said of it."""

from __future__ import annotations

from typing import Literal

import torch

from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes

MARGIN = 1.1
"""The in-core step has to fit with a tenth to spare: what allocators and threads take is nobody's value."""


def fitting_mode(needed_bytes: int, free_bytes: int) -> tuple[Literal["run", "swap-all"], str]:
    """``run`` or ``swap-all`` for a step that takes ``needed_bytes`` beside what is there, and why in words."""
    mode: Literal["run", "swap-all"] = "run" if needed_bytes * MARGIN <= free_bytes else "swap-all"
    verb = "fits" if mode == "run" else "does not fit"
    return mode, (
        f"mode auto chose {mode}: in-core the step {verb}, it needs {format_bytes(needed_bytes)} "
        f"and a tenth to spare where {format_bytes(free_bytes)} are free"
    )


def memory_left(where: torch.device) -> int:
    """Bytes that may still be taken there."""
    return available_bytes() if where.type == "cpu" else torch.cuda.mem_get_info(where)[0]
