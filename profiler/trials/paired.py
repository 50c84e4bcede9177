"""What the launching thread takes, told by steps that run in turn: clocks, timed hooks, and how often to repeat.

Each round gives one sample of every cost, as a difference between its own steps. Machines are noisy, so rounds are
added until a sign test tells every cost from 0. What cannot be told by the last one is named and not guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import median
from typing import Any

LEAST_ROUNDS, MOST_ROUNDS = 7, 21
"""With 7 samples, all above 0, the 95% interval of the median is above 0."""
SIGNIFICANCE = 0.05

Hook = Callable[[Any], Any]


class HookSeconds:
    """CPU seconds inside of hooks, each counted on the thread on which autograd calls it."""

    def __init__(self) -> None:
        self.pack_s = self.unpack_s = 0.0

    @property
    def total_s(self) -> float:
        return self.pack_s + self.unpack_s

    def timed_pack(self, pack: Hook) -> Hook:
        """The hook, its seconds added to ``pack_s``."""

        def run(argument: Any) -> Any:
            start_s = time.thread_time()
            try:
                return pack(argument)
            finally:
                self.pack_s += time.thread_time() - start_s

        return run

    def timed_unpack(self, unpack: Hook) -> Hook:
        """The hook, its seconds added to ``unpack_s``."""

        def run(argument: Any) -> Any:
            start_s = time.thread_time()
            try:
                return unpack(argument)
            finally:
                self.unpack_s += time.thread_time() - start_s

        return run


def step_clock(device_type: str) -> Callable[[], float]:
    """CPU seconds of what launches a step: of the calling thread; on CUDA backward has a thread of its own."""
    return time.thread_time if device_type == "cpu" else time.process_time


def is_above_zero(samples: Sequence[float]) -> bool:
    """Whether the 95% interval of the median is above 0, by the sign test."""
    count, others = len(samples), sum(sample <= 0 for sample in samples)
    return 2 * sum(comb(count, index) for index in range(others + 1)) / 2**count < SIGNIFICANCE


def costs_of(a_round: Callable[[], Mapping[str, float]]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The median of each cost over as many rounds as it takes, and the names of those that stay untold and count as 0.

    The first round is thrown away.
    """
    a_round()
    rounds: list[Mapping[str, float]] = []
    untold: list[str] = []
    while len(rounds) < MOST_ROUNDS:
        rounds.append(a_round())
        untold = [name for name in rounds[0] if not is_above_zero([one[name] for one in rounds])]
        if len(rounds) >= LEAST_ROUNDS and not untold:
            break
    medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
    return medians | dict.fromkeys(untold, 0.0), tuple(untold)
