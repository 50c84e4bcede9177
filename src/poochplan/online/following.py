"""Following: the driver of a segment under a plan that was made online; metered ones are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.formats.plan import Plan
from poochplan.profiler.live.living import live_tensors
from poochplan.profiler.live.watch import Pack, Scene, Watch
from poochplan.runtime.drivers.course import Course
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.drivers.follow import Follow
from poochplan.runtime.drivers.swap_each import SwapEach
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.metering.meter import LiveBytesMeter

ALWAYS, SELDOM = 2, 50
"""The first segments that follow a plan are metered, and then one in so many."""


class Following(Follow):
    """Tells ``over`` whether the segment was the planned one, when it has ended."""

    def __init__(self, course: Course, over: Callable[[Segment], None]) -> None:
        super().__init__(course, SwapEach())
        self._over = over

    def end(self, segment: Segment, outcome: Outcome) -> None:
        if outcome in (Outcome.USED, Outcome.LEFT_OVER):
            self._over(segment)


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

    def region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._meter.around_region(call)

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        self._meter.saved(tensor)
        return pack(tensor)


def is_metered(followed: int) -> bool:
    """Whether the segment that follows a plan for the ``followed``-th time, from 0, is metered."""
    return followed < ALWAYS or followed % SELDOM == 0
