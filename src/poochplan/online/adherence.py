"""Adherence: how the segments of each kind keep to their plan: how often, what lives beside them, when they stopped."""

from __future__ import annotations

from poochplan.online.plans.ways import Way
from poochplan.profiler.live.lines import Key
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.watch.growth import Growth

from .following import ALWAYS, Beside, is_metered

MOST_STUDIES = 3
"""Of one kind of segment, where its plans are not what it does."""
MISSES = 2
"""Segments in a row that leave their plan, after which they are studied anew."""


class Adherence:
    """State: of each kind that has a plan, its segments under it, and what was seen of what lives beside them."""

    def __init__(self) -> None:
        self._followed: dict[Key, int] = {}
        self._beside: dict[Key, Beside] = {}
        self._missed: dict[Key, int] = {}
        self._studies: dict[Key, int] = {}
        self._to_check: set[Key] = set()

    @property
    def followed(self) -> int:
        """So many segments have begun under a plan."""
        return sum(self._followed.values())

    def beside(self, key: Key) -> Beside:
        """What lives beside the segments of that kind."""
        return self._beside.setdefault(key, Beside(Growth()))

    def profiled(self, key: Key, growth: Growth) -> Beside:
        """A kind was profiled, and this seen of what lives beside it."""
        found = self._beside[key] = Beside(growth)
        return found

    def is_metered(self, key: Key) -> bool:
        """Whether the next segment of that kind is to be metered from a census on."""
        return is_metered(self._followed.get(key, 0)) or key in self._to_check

    def is_new(self, key: Key) -> bool:
        """Whether the next segment is one of the first under its plan."""
        return self._followed.get(key, 0) < ALWAYS

    def begins(self, key: Key) -> None:
        """A segment of that kind follows its plan."""
        self._followed[key] = self._followed.get(key, 0) + 1
        self._to_check.discard(key)

    def check_next(self, key: Key) -> None:
        """The next segment of that kind is metered from a census on."""
        self._to_check.add(key)

    def starts_anew(self, key: Key) -> None:
        """Another plan is made for that kind."""
        self._followed[key] = 0

    def has_ended(self, way: Way, segment: Segment) -> bool:
        """A segment that was to follow is over; whether its kind is to be studied anew."""
        if not segment.diverged:
            self._missed[way.key] = 0
            return False
        self._missed[way.key] = self._missed.get(way.key, 0) + 1
        studies = self._studies.get(way.key, 1)
        if self._missed[way.key] < MISSES or studies >= MOST_STUDIES:
            return False
        self._studies[way.key] = studies + 1
        self._missed[way.key] = 0
        return True
