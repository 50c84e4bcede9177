"""Segments under a plan that was made online: some are metered, and looked at before for what lives beside them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from poochplan.formats.plan import Plan
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Profile
from poochplan.profiler.live.watch import Scene, Watch
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.watch.census import census_bytes
from poochplan.runtime.watch.growth import Growth
from poochplan.runtime.watch.step_meter import EVERY, Moment, StepMeter

ALWAYS = 2
"""The first segments that follow a plan are metered from a census on, and then one in ``EVERY``."""


class Metered(Watch):
    """A segment whose peak is metered, what lives beside it among it: ``peak_bytes``, and where that was."""

    def __init__(self, scene: Scene, driver: Driver, meter: StepMeter, engine: Engine, plan: Plan) -> None:
        super().__init__(scene, driver)
        self.plan = plan
        self.peak_bytes: int | None = None
        self.blocks_peak_bytes: int | None = None
        """The same with an arena's blocks in place of the arena."""
        self.moment: Moment | None = None
        self.is_certain = False
        """Whether it was metered from a census on, so that what others have made is not in it."""
        self._meter, self._engine = meter, engine

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self._meter.step_begins(self._engine, self._engine.device)
        try:
            yield
        finally:
            self._meter.step_is_over()
            self.peak_bytes, self.moment = self._meter.peak_bytes, self._meter.moment
            self.blocks_peak_bytes = self._meter.blocks_peak_bytes
            self.is_certain = self._meter.is_certain


def is_metered(followed: int) -> bool:
    """Whether the segment that follows a plan for the ``followed``-th time, from 0, is metered."""
    return followed < ALWAYS or followed % EVERY == 0


class Beside:
    """What lives beside the segments that follow one plan: looked at now and then, and in time where it grows.

    Parameters
    ----------
    growth: what was seen of it before.

    State: that, and the number of the segment that is to be looked at next.
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self._next: float = math.inf

    def is_due(self, number: int) -> bool:
        """Whether that segment is to be looked at because of what was seen before."""
        return number >= self._next

    def outgrown(self, number: int, profile: Profile, plan: Plan, device_type: str) -> int:
        """Bytes that live now, as a segment begins, and did not when it was profiled; 0 where the plan fits its budget
        with them.
        """
        unit, now_bytes = ALLOCATION_UNIT_BYTES, census_bytes(device_type)
        self.growth.saw(number, now_bytes)
        there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
        planned_bytes = sum(-(-value.size_bytes // unit) * unit for value in there)
        more_bytes = now_bytes - planned_bytes
        room_bytes = plan.budget_bytes - plan.prediction.peak_bytes - more_bytes
        rate = self.growth.latest_bytes_per_segment
        self._next = number + max(1.0, room_bytes / rate / 2) if rate else math.inf
        return more_bytes if room_bytes < 0 else 0

    def ahead_bytes(self, number: int, foreseen_bytes: int) -> int:
        """To be left free for growth: what is foreseen, else as much as it grows while the loop goes on for as long
        again as it has.
        """
        return foreseen_bytes or int(self.growth.steady_bytes_per_segment * max(EVERY, number))


def left_free(ahead_bytes: int, room_bytes: int) -> int:
    """How much of the room between the smallest budget and this one is left to growth: all that is wanted if it fits,
    else half of the room, for plans need some.
    """
    return ahead_bytes if ahead_bytes <= room_bytes else room_bytes // 2
