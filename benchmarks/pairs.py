"""Step times compared in pairs: how every benchmark here says that one kind of step is slower than another.

Machines are noisy, so that two step times are only compared in pairs: one step of each kind right after the other, in
alternating order, from the same state of the model. The figure is the median of the pairs' ratios with a 95% bootstrap
interval; the same of plain against plain steps, measured in the same run, tells what the machine alone does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import poochplan
from poochplan.workload import Workload, load_workload

CONFIGS = Path(__file__).parent.parent / "configs"
RESAMPLES = 10_000

Seconds = tuple[float, float]
"""On the wall, and those of CPU, which other users of the machine disturb less."""
Step = Callable[[], Seconds]
T = TypeVar("T")


def compared(pairs: list[tuple[Seconds, Seconds]]) -> dict[str, Any]:
    """Median of second / first over the pairs, with its 95% bootstrap interval, and the spread of the ratios."""
    return {"pairs": len(pairs)} | {
        clock: ratio_of_pairs([(first[index], second[index]) for first, second in pairs])
        for index, clock in enumerate(("wall", "cpu"))
    }


def ratio_of_pairs(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = np.array([second / first for first, second in pairs])
    drawn = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    quartiles = np.percentile(ratios, [25, 75])
    return {
        "median_ratio": round(float(np.median(ratios)), 5),
        "interval_95": [round(float(low), 5), round(float(high), 5)],
        "quartiles": [round(float(value), 4) for value in quartiles],
        "median_s": [round(float(value), 5) for value in np.median(np.array(pairs), axis=0)],
    }


def in_pairs(
    first: Callable[[], T], second: Callable[[], T], count: int, order: random.Random | None = None
) -> list[tuple[T, T]]:
    """Seconds of ``count`` pairs, the order alternating, or drawn anew for each where ``order`` draws."""
    pairs = []
    for index in range(count):
        if order.random() < 0.5 if order else index % 2:
            second_s = second()
            pairs.append((first(), second_s))
        else:
            first_s = first()
            pairs.append((first_s, second()))
    return pairs


def one_step(workload: Workload) -> Seconds:
    assert workload.optimizer is not None
    workload.optimizer.zero_grad(set_to_none=True)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    loss = workload.step()
    loss.backward()
    workload.optimizer.step()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def load(name: str, settings: dict[str, Any]) -> Workload:
    """A file in ``configs/`` or any WORKLOAD, from the same seed each time."""
    torch.manual_seed(0)
    config = CONFIGS / f"{name}.toml"
    return load_workload(str(config) if config.exists() else name, settings).workload


def profiled(workload: Workload, name: str, **options: Any) -> poochplan.Profile:
    model, optimizer = workload.model, workload.optimizer
    return poochplan.profile(workload.step, model=model, optimizer=optimizer, workload=name, **options)


class Planned:
    """Steps of a workload inside and outside of one session, so that both kinds share model, memory and allocator."""

    def __init__(self, workload: Workload, plan: poochplan.Plan) -> None:
        self.workload = workload
        self.session: poochplan.Session = poochplan.apply(plan, workload.model, meter="never")

    def plain(self) -> Seconds:
        with self.session.away():
            return one_step(self.workload)

    def planned(self) -> Seconds:
        return one_step(self.workload)

    def measure(self, pairs: int, noise_pairs: int) -> dict[str, Any]:
        """Planned against plain steps, and plain against plain ones (where there are to be any), in one session."""
        with self.session:
            for _ in range(2):
                self.plain()
                self.planned()
            noise = in_pairs(self.plain, self.plain, noise_pairs)
            found = in_pairs(self.plain, self.planned, pairs)
            total = self.session.report().total
        return {"planned_over_plain": compared(found), "fallbacks": total.fallbacks} | (
            {"plain_over_plain": compared(noise)} if noise else {}
        )
