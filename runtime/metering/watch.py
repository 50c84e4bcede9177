"""Watch: whether the steps of a session that rests take more than they should. Nothing of such a step is observed: its
peak is read once it is over.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.run_report import StepReport

from .allocated import StepPeak
from .step_meter import StepMeter

CENSUS_SHARE = 0.003
"""Share of a loop's time that censuses may take. A census counts all tensors of the process."""
GROWS = 1.25
"""Where no budget is kept, steps may take by this factor more than the first ones."""
FIRST = 8
"""So many steps are the first ones: a loop may have several optimizers, whose steps differ."""


class MostBytes(NamedTuple):
    size_bytes: float
    is_kept: bool
    """Whether they are a budget that is kept. Else the first steps may take more, and tell how much later ones may."""


class Watch:
    """State: the running step; the number of steps and the largest peak since :meth:`take`; and whether the next step
    begins with a census.

    It is called once where a step begins and once where it ends, and must cost next to nothing there: only the few
    steps that begin with a census go through the meter, others read the allocator's counter.

    Parameters
    ----------
    most: the bytes that a step may take.
    """

    def __init__(self, meter: StepMeter, engine: Engine, device: ComputeDevice, most: MostBytes) -> None:
        self._meter, self._engine, self._device = meter, engine, device
        self._most_bytes, self._to_learn = most.size_bytes, 0 if most.is_kept else FIRST
        self._steps, self._peak_bytes, self._last_bytes = 0, 0, 0
        self._is_open = self.has_stepped = False
        """Whether a step is running, and whether an optimizer has stepped."""
        self._is_due = True
        self._due_s = 0.0
        self._source: StepPeak | None = None
        """Of the running step, if it needs no more than that."""

    def begins(self) -> bool:
        """A step is about to begin, or goes on with another micro-batch. Returns whether the last one took too much, if
        the loop has no optimizer that would have ended it.
        """
        is_over = False if self.has_stepped else self._ends()
        if self._is_open:
            return is_over
        self._is_open = True
        if self._is_due or time.monotonic() > self._due_s:
            self._looks()
        else:
            self._source = self._meter.source
            if self._source is not None:
                self._source.step_begins()
        return is_over

    def _looks(self) -> None:
        """The step begins with a census."""
        start_s = time.monotonic()
        self._is_due, self._source = False, None
        self._meter.step_begins(self._engine, self._device, is_due=True)
        end_s = time.monotonic()
        self._due_s = end_s + (end_s - start_s) / CENSUS_SHARE

    def stepped(self) -> bool:
        """An optimizer has stepped. Returns whether the step took too much."""
        self.has_stepped = True
        return self._ends()

    def _ends(self) -> bool:
        """The step is over, if one is open. Returns whether it has taken too much."""
        if not self._is_open:
            return False
        self._is_open = False
        self._steps += 1
        if self._source is None:
            self._meter.step_is_over()
            peak_bytes, is_certain = self._meter.peak_bytes, self._meter.is_certain
        else:
            found, is_certain = self._source.now(), not self._source.needs_census
            peak_bytes = None if found is None else found.peak_bytes
        self._last_bytes = peak_bytes = peak_bytes or 0
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
        is_above = peak_bytes > self._most_bytes or (not self._to_learn and self._device.step_retries() > 0)
        if self._to_learn and peak_bytes:
            self._to_learn -= 1
            self._most_bytes = GROWS * peak_bytes if is_above else self._most_bytes
            return False
        if not is_above:
            return False
        self._is_due = not is_certain  # then the next step tells
        return is_certain

    @property
    def last(self) -> StepReport:
        """Of the running step, or of the last one."""
        return StepReport(steps=1, peak_bytes=self._last_bytes or None)

    def take(self) -> StepReport:
        """The sum of the steps since the last call."""
        taken = StepReport(steps=self._steps, peak_bytes=self._peak_bytes or None)
        self._steps = self._peak_bytes = 0
        return taken
