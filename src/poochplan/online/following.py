"""Segments under a plan that was made online: some are metered, and looked at before for what lives beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from poochplan.formats.plan import Plan
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Profile
from poochplan.profiler.live.living import live_bytes_now, live_tensors
from poochplan.profiler.live.watch import Scene, Watch
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.meter import LiveBytesMeter

ALWAYS, SELDOM = 2, 50
"""The first segments that follow a plan are metered, and then one in so many."""


class Metered(Watch):
    """A segment whose peak of live bytes is metered, what lives beside it among them."""

    def __init__(self, scene: Scene, driver: Driver, meter: LiveBytesMeter, plan: Plan) -> None:
        super().__init__(scene, driver)
        self.plan = plan
        self.peak_bytes = 0
        self._meter = meter

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        for tensor in live_tensors(self.scene.where.type):
            self._meter.watch(tensor)
        self._meter.restart()
        self._meter.switch_on()
        try:
            yield
        finally:
            self._meter.switch_off()
            self.peak_bytes = self._meter.peak_bytes


def is_metered(followed: int) -> bool:
    """Whether the segment that follows a plan for the ``followed``-th time, from 0, is metered."""
    return followed < ALWAYS or followed % SELDOM == 0


def more_beside(profile: Profile, plan: Plan, device_type: str) -> int:
    """Bytes that live now and did not when the segment was profiled; 0 where the plan fits its budget with them."""
    unit = ALLOCATION_UNIT_BYTES
    planned_bytes = sum(-(-value.size_bytes // unit) * unit for value in profile.values if value.born < 0)
    more_bytes = live_bytes_now(device_type) - planned_bytes
    return more_bytes if plan.prediction.peak_bytes + more_bytes > plan.budget_bytes else 0
