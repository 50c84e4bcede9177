"""Always: the chooser that gives every segment a driver of one make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poochplan.formats.plan import Instructions
from poochplan.runtime.engine.cursor import Segment

from .course import Course
from .driver import Driver
from .follow import Follow
from .swap_each import SwapEach


class Always:
    """``alternatives``: the instructions that its drivers follow."""

    def __init__(self, make: Callable[[], Driver], alternatives: Sequence[Instructions] = ()) -> None:
        self._make = make
        self.alternatives = alternatives

    @classmethod
    def following(cls, instructions: Instructions) -> Always:
        """Segments follow these."""
        course = Course.of(instructions)
        return cls(lambda: Follow(course, SwapEach()), [instructions])

    def choose(self, segment: Segment) -> Driver:
        return self._make()
