"""Following: the driver of a segment under a plan that was made online; metered ones are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.profiler.live.watch import Pack, Scene, Watch
from poochplan.runtime.drivers.course import Course
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.drivers.follow import Follow
from poochplan.runtime.drivers.swap_each import SwapEach
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.watch.step_meter import EVERY, Moment, StepMeter

from .ways import Way

ALWAYS = 2
"""The first segments that follow a plan are metered, and then one in ``EVERY``."""


class Following(Follow):
    """Tells ``over`` whether the segment was the planned one, when it has ended."""

    def __init__(self, course: Course, over: Callable[[Segment], None]) -> None:
        super().__init__(course, SwapEach())
        self._over = over

    def end(self, segment: Segment, outcome: Outcome) -> None:
        if outcome in (Outcome.USED, Outcome.LEFT_OVER):
            self._over(segment)


class Metered(Watch):
    """A segment whose peak is metered, what lives beside it among it: ``peak_bytes``, and where that was."""

    def __init__(self, scene: Scene, driver: Driver, meter: StepMeter, engine: Engine, way: Way) -> None:
        super().__init__(scene, driver)
        self.way = way
        self.peak_bytes: int | None = None
        self.moment: Moment | None = None
        self._meter, self._engine = meter, engine

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self._meter.step_begins(self._engine, self._engine.device)
        try:
            yield
        finally:
            self._meter.step_is_over()
            self.peak_bytes, self.moment = self._meter.peak_bytes, self._meter.moment

    def region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._meter.mode.around_region(call)

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        self._meter.mode.saved(tensor)
        return pack(tensor)


def is_metered(followed: int) -> bool:
    """Whether the segment that follows a plan for the ``followed``-th time, from 0, is metered."""
    return followed < ALWAYS or followed % EVERY == 0
