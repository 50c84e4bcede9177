"""StepTrace: what each stream does in one step, op by op, and live bytes over its time; predicted, or measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD = "step", "compute", "out-link", "in-link", "launching thread"
TRACKS = (STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD)


@dataclass(frozen=True)
class Bar:
    """One stretch of time on a track of a trace, or on a row of a picture."""

    row: str
    what: str
    start_s: float
    end_s: float
    label: str = ""
    """The values that are moved, waited for or recomputed; of an op its layer."""


@dataclass(frozen=True)
class MemoryCurve:
    """A step function: from ``times_s[i]`` to ``times_s[i + 1]`` there are ``size_bytes[i]`` live bytes.

    ``times_s`` has one entry more than ``size_bytes`` and starts at 0.
    """

    times_s: npt.NDArray[np.float64]
    size_bytes: npt.NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        return int(self.size_bytes.max(initial=0))

    @property
    def peak_s(self) -> float:
        """Middle of the first stretch at which the peak is reached."""
        if not self.size_bytes.size:
            return 0.0
        index = int(self.size_bytes.argmax())
        return float(self.times_s[index] + self.times_s[index + 1]) / 2


@dataclass(frozen=True)
class StepTrace:
    """Bars lie on ``TRACKS``; on one track they follow each other or lie inside of each other."""

    workload: str
    source: Literal["predicted", "measured"]
    budget_bytes: int
    step_s: float
    bars: tuple[Bar, ...]
    memory: MemoryCurve
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """What else a reader may want to know: peaks, overhead."""
