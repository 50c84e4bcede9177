"""Watch: whether the steps of a session that rests take more than they should. Nothing of such a step is observed: its
peak is read once it is over.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from poochplan.formats.profile import Memory
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.run_report import StepReport

from .allocated import joined_count
from .step_meter import StepMeter

CENSUS_SHARE = 0.003
"""Share of a loop's time that censuses may take. A census counts all tensors of the process."""
GROWS = 1.25
"""Where no budget is kept, steps may take by this factor more than the first one."""


class MostBytes(NamedTuple):
    size_bytes: float
    is_kept: bool
    """Whether they are a budget that is kept. Else the first step may take more, and tells how much later ones may."""


class Watch:
    """State: the running step, whether the next one begins with a census, and the time that the last census took.

    Parameters
    ----------
    most: the bytes that a step may take.
    """

    def __init__(self, meter: StepMeter, engine: Engine, device: ComputeDevice, most: MostBytes) -> None:
        self._meter, self._engine, self._device = meter, engine, device
        self._most_bytes, self._learns = most.size_bytes, not most.is_kept
        self.report: StepReport | None = None
        """Of the running step, or of the last one; None before there is one."""
        self._is_open = self._has_stepped = False
        self._is_due = True
        self._looked_s = self._look_took_s = 0.0

    def begins(self) -> StepReport | None:
        """A step is about to begin, or goes on with another micro-batch. Returns the report of the last one, if the
        loop has no optimizer that would have ended it.
        """
        ended = None if self._has_stepped else self.ends()
        if self._is_open:
            return ended
        self._is_open, self.report = True, StepReport(steps=1)
        start_s = time.monotonic()
        is_due = self._is_due or start_s - self._looked_s > self._look_took_s / CENSUS_SHARE
        memory = Memory.LIVE if joined_count() is None else Memory.ALLOCATED
        self._meter.step_begins(self._engine, self._device, is_due=is_due, memory=memory)
        if is_due:
            self._is_due, self._looked_s = False, time.monotonic()
            self._look_took_s = self._looked_s - start_s
        return ended

    def stepped(self) -> StepReport | None:
        """An optimizer has stepped."""
        self._has_stepped = True
        return self.ends()

    def ends(self) -> StepReport | None:
        """The step is over, if one is open: its report."""
        if not self._is_open:
            return None
        self._is_open = False
        self._meter.step_is_over()
        assert self.report is not None
        peak_bytes = self.report.peak_bytes = self._meter.peak_bytes
        if self._learns and peak_bytes is not None:
            self._learns = False
            self._most_bytes = self._most_bytes if peak_bytes <= self._most_bytes else GROWS * peak_bytes
        return self.report

    def is_above(self, report: StepReport) -> bool:
        """Whether the step has taken too much. If its meter is not certain, the next one tells."""
        if self._learns or not report.peak_bytes or report.peak_bytes <= self._most_bytes:
            return False
        self._is_due = not self._meter.is_certain
        return self._meter.is_certain
