"""Segments under a plan that was made online: some are metered, and looked at before for what lives beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Profile
from poochplan.profiler.live.watch import Pack, Scene, Watch
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.watch.census import census_bytes
from poochplan.runtime.watch.step_meter import EVERY, Moment, StepMeter

ALWAYS = 2
"""The first segments that follow a plan are metered, and then one in ``EVERY``."""


class Metered(Watch):
    """A segment whose peak is metered, what lives beside it among it: ``peak_bytes``, and where that was."""

    def __init__(self, scene: Scene, driver: Driver, meter: StepMeter, engine: Engine, plan: Plan) -> None:
        super().__init__(scene, driver)
        self.plan = plan
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


def more_beside(profile: Profile, plan: Plan, device_type: str) -> int:
    """Bytes that live now and did not when the segment was profiled; 0 where the plan fits its budget with them."""
    unit = ALLOCATION_UNIT_BYTES
    planned_bytes = sum(-(-value.size_bytes // unit) * unit for value in profile.values if value.born < 0)
    more_bytes = census_bytes(device_type) - planned_bytes
    return more_bytes if plan.prediction.peak_bytes + more_bytes > plan.budget_bytes else 0
