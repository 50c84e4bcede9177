"""Earned: how long a loop may stand still for its plan, by how long it has run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

AT_ONCE_S = 2.0
SHARE = 0.1
"""Of what the loop has run, where that is more."""
LEAST_S = 0.05
"""Less is not worth a pause."""


def ranks_here() -> int:
    """So many processes of this training share the host."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks)) if ranks.isdigit() else 1


def has_no_processor_to_spare() -> bool:
    """Whether training computes on all processors. What runs beside it then is dear: threads of one op wait for the one
    whose processor is taken, and for each other. To stand still meanwhile takes less.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.get_num_threads() * ranks_here() >= there


class Earned:
    """State: since when the loop runs, and how long it has stood still."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._spent_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the loop may stand still now."""
        return max(AT_ONCE_S, SHARE * (time.monotonic() - self._since_s)) - self._spent_s

    def spend(self, work: Callable[[float], object], least_s: float = LEAST_S) -> bool:
        """Runs ``work(most_s)`` while the loop stands still, where that is better than beside it and has been earned;
        whether it ran.
        """
        left_s = self.left_s
        if left_s < least_s or not has_no_processor_to_spare():
            return False
        start_s = time.monotonic()
        try:
            work(left_s)
        finally:
            self._spent_s += time.monotonic() - start_s
        return True
