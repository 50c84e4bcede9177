"""Training steps one after the other: their seconds, page faults, resident memory and bits."""

from __future__ import annotations

import hashlib
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pairs import Seconds
from poochplan.runtime.session import Session
from poochplan.workload import Workload
from tests.allocated_bytes import AllocatedBytes

SETTLED = 4
"""Steps before those that are timed: two are metered by their ops, one is learned from."""


class MeasuredSteps:
    """State: seconds, page faults, resident bytes and peak of each step, and a digest of all losses and parameters."""

    def __init__(self, workload: Workload, meter: AllocatedBytes | None = None) -> None:
        self._workload, self._meter = workload, meter
        self._digest = hashlib.sha256()
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.faults: list[int] = []
        self.resident: list[int] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []
        """With the arena, where there is one."""
        self.arena_bytes: Callable[[], int] = lambda: 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.one()

    def one(self) -> Seconds:
        """A step, from the gradients' end to the optimizer's; its seconds on the wall and of the processor."""
        faults = _faults()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        loss = self._step()
        found = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self.seconds.append(found[0])
        self.processor.append(found[1])
        self.faults.append(_faults() - faults)
        self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        if self._meter is not None:
            self.peaks.append(self._meter.peak + self.arena_bytes())
        self.losses.append(loss)
        self._digest.update(str(loss).encode())
        return found

    def _step(self) -> float:
        optimizer = self._workload.optimizer
        assert optimizer is not None
        optimizer.zero_grad(set_to_none=True)
        if self._meter is not None:  # from here on the arena is taken
            self._meter.restart()
        loss = self._workload.step()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss)

    def found(self) -> dict[str, Any]:
        """Of all steps so far; times and faults are medians of those behind the first ``SETTLED``."""
        for parameter in self._workload.model.parameters():
            self._digest.update(parameter.detach().numpy().tobytes())
        return {
            "step_s": statistics.median(self.seconds[SETTLED:]),
            "processor_s": statistics.median(self.processor[SETTLED:]),
            "faults": statistics.median(self.faults[SETTLED:]),
            "resident_growth_bytes": self.resident[-1] - self.resident[1],
            "resident_bytes": self.resident[-1],
            "physical_peak_bytes": max(self.peaks, default=None),
            "digest": self._digest.hexdigest()[:16],
        }


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def arena_bytes(session: Session) -> int:
    """Of the arena that serves the session's steps; 0 where none does."""
    arena = session.report().arena
    return arena.size_bytes if arena is not None else 0
