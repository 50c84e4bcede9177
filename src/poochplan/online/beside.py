"""Beside: what lives beside the segments that follow one plan, looked at now and then, and in time where it grows."""

from __future__ import annotations

import math

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import rounded_up
from poochplan.runtime.watch.census import census_bytes
from poochplan.runtime.watch.growth import Growth
from poochplan.runtime.watch.step_meter import EVERY


class Beside:
    """State: what was seen of it before, and the number of the segment that is to be looked at next."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        self._next: float = math.inf

    def is_due(self, number: int) -> bool:
        """Whether that segment is to be looked at because of what was seen before."""
        return number >= self._next

    def outgrown(self, number: int, profile: Profile, plan: Plan, device_type: str) -> int:
        """Bytes that live now, as a segment begins, and did not when it was profiled; 0 where the plan fits its budget
        with them.
        """
        now_bytes = census_bytes(device_type)
        self._growth.saw(number, now_bytes)
        there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
        more_bytes = now_bytes - sum(rounded_up(value.size_bytes) for value in there)
        room_bytes = plan.budget_bytes - plan.prediction.peak_bytes - more_bytes
        rate = self._growth.latest_bytes_per_segment
        self._next = number + max(1.0, room_bytes / rate / 2) if rate else math.inf
        return more_bytes if room_bytes < 0 else 0

    def ahead_bytes(self, number: int, foreseen_bytes: int) -> int:
        """To be left free for growth: what is foreseen, else as much as it grows while the loop goes on for as long
        again as it has.
        """
        return foreseen_bytes or int(self._growth.steady_bytes_per_segment * max(EVERY, number))


def left_free(ahead_bytes: int, room_bytes: int) -> int:
    """How much of the room between the smallest budget and this one is left to growth: all that is wanted if it fits,
    else half of the room, for plans need some.
    """
    return ahead_bytes if ahead_bytes <= room_bytes else room_bytes // 2
