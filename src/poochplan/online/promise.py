"""Promise: whether the steps under a plan take the time that it predicts, and why not."""

from __future__ import annotations

import os
from statistics import median

import msgspec

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, LinkDirection
from poochplan.runtime.arena.library import is_loaded
from poochplan.runtime.run_report import StepReport

STEPS = 10
"""Number of steps that are compared with the prediction. The first two, in which an arena is recorded, do not move
their median."""
MOST = 1.25
"""A step is slow if it takes more than this factor of its predicted time."""

COPIES = "copies to the host and back take longer than was measured"
NO_ARENA = "their memory does not come from one arena yet"
BUSY = "something else uses the processors"
SLOWER = "operations take longer than when they were measured"


class Promise:
    """State: seconds of the steps so far under one plan, and how long each waited for copies."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._seconds: list[float] = []
        self._reports: list[StepReport] = []

    @property
    def step_s(self) -> float:
        return median(self._seconds)

    @property
    def stall_s(self) -> float:
        """Median seconds in which a step waits for copies."""
        return median(report.stall_s for report in self._reports)

    def took(self, seconds: float, report: StepReport) -> str:
        """A step has followed the plan. Returns why steps are slower than predicted, once; else empty."""
        if len(self._seconds) == STEPS:
            return ""
        self._seconds.append(seconds)
        self._reports.append(report)
        if len(self._seconds) < STEPS or self.step_s <= MOST * self.plan.prediction.step_s:
            return ""
        return self._why()

    def _why(self) -> str:
        if self.stall_s > (self.step_s - self.plan.prediction.step_s) / 2:
            return COPIES
        has_arena = self.plan.prediction.arena_peak_bytes is not None and is_loaded()
        if has_arena and not self._reports[-1].served_bytes:
            return NO_ARENA
        return BUSY if os.getloadavg()[0] > (os.cpu_count() or 1) else SLOWER

    def link_found(self, link: Link) -> Link:
        """The link as these steps show it: slower by the time that they waited."""
        report = self._reports[-1]
        copies_s = report.out_bytes / link.outward.bandwidth_bytes_per_s
        copies_s += report.in_bytes / link.inward.bandwidth_bytes_per_s
        factor = 1 + self.stall_s / copies_s if copies_s else 1.0
        return msgspec.structs.replace(link, outward=_slower(link.outward, factor), inward=_slower(link.inward, factor))


def _slower(direction: LinkDirection, factor: float) -> LinkDirection:
    return LinkDirection(
        latency_s=direction.latency_s * factor, bandwidth_bytes_per_s=direction.bandwidth_bytes_per_s / factor
    )
