"""The host tier as places: where each value goes. Planned offsets first; what is not planned goes behind."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from poochplan.formats.plan import Instructions

from .intervals import Intervals
from .saved_value import SavedValue

QUIET_STEPS = 10
"""After so many steps in a row that placed nothing behind the planned bytes, what was taken there is given back."""


class _Place(weakref.ref[SavedValue]):
    """Where a value lies behind the planned bytes; nowhere yet when an interrupt comes before it is known."""

    offset = -1
    size_bytes = 0


class HostTier:
    """State: who occupies each planned place, and who lies behind them. Large enough for any of the instructions.

    A place behind the planned bytes is free again when its value dies or could not be written, even while a copy of it
    is still queued. Whoever comes next is safe there:

    * Copies out run in order on one stream. So the next value's bytes are written after those of the dead one.
    * The next value is fetched only after its own copy out was waited for, and that copy is behind the dead one's.
    * A copy back of the dead value may read the next one's bytes. Nobody looks at the buffer that it fills.

    Values die on any thread, also where the garbage collector finds them on one that copies. So nothing is locked and
    no Python runs there: the dead reference is put into a queue, which the next placement works off.
    """

    def __init__(self, alternatives: Sequence[Instructions]) -> None:
        self._followed: Instructions | None = None
        self.planned_bytes = self._room_bytes = _planned_bytes(alternatives)
        self._first = 0
        """Where the planned places begin."""
        self._occupants: dict[int, weakref.ref[SavedValue]] = {}
        self._of_others: list[weakref.ref[SavedValue]] = []
        """Who was placed by other instructions and may still be there: its places overlap with those of this one."""
        self._behind = Intervals(self.planned_bytes)
        self._places: dict[int, _Place] = {}
        """Who lies behind the planned bytes, by offset."""
        self._died: deque[_Place] = deque()
        self._placed_behind = False
        self._quiet_steps = 0

    @property
    def end_bytes(self) -> int:
        """Every value that is alive lies before this."""
        self._free_the_dead()
        return self._behind.end_bytes if self._places else self.planned_bytes

    def grow(self, alternatives: Sequence[Instructions]) -> None:
        """From now on these may be followed too. Where they need more room, their places are behind all others."""
        room_bytes = _planned_bytes(alternatives)
        if room_bytes > self._room_bytes:
            self._free_the_dead()
            self._first, self._room_bytes = self._behind.take(room_bytes), room_bytes
            self.planned_bytes = self._first + room_bytes
            self._followed = None

    def follow(self, instructions: Instructions) -> None:
        """From now on values are placed by these."""
        if instructions is self._followed:
            return
        self._followed = instructions
        before = (*self._of_others, *self._occupants.values())
        self._of_others = [reference for reference in before if reference() is not None]
        self._occupants = {}

    def step_begins(self) -> bool:
        """Whether what lies behind ``end_bytes`` has not been needed for long, and is to be given back now."""
        self._quiet_steps = 0 if self._placed_behind else self._quiet_steps + 1
        self._placed_behind = False
        return self._quiet_steps == QUIET_STEPS

    def place(self, value: SavedValue) -> int:
        """Byte offset for the value: its planned place unless somebody of an earlier step is still there."""
        planned = -1
        if self._followed is not None and value.index is not None:
            planned = self._followed.values[value.index].host_offset
            planned += self._first if planned >= 0 else 0
        if planned >= 0 and self._is_free(planned, value):
            self._occupants[planned] = weakref.ref(value)
            return planned
        self._free_the_dead()
        self._placed_behind = True
        place = _Place(value, self._died.append)
        place.size_bytes = value.size_bytes
        place.offset = self._behind.take(value.size_bytes)
        self._places[place.offset] = place
        return place.offset

    def give_up(self, offset: int) -> None:
        """The value that was placed at ``offset`` is dead, or could not be written and its copy has ended."""
        place = self._places.pop(offset, None)
        if place is not None:  # a planned place stays its value's
            self._behind.give_back(offset, place.size_bytes)

    def _free_the_dead(self) -> None:
        while self._died:
            place = self._died.popleft()
            # The traceback of an interrupt may have kept one that was given up, and that is another value's by now.
            if self._places.get(place.offset) is place:
                self.give_up(place.offset)

    def _is_free(self, offset: int, value: SavedValue) -> bool:
        reference = self._occupants.get(offset)
        occupant = reference() if reference is not None else None
        if occupant is not None and occupant is not value and occupant.host_offset == offset:  # or its copy has failed
            return False
        if not self._of_others:
            return True
        others = (reference() for reference in self._of_others)
        end = offset + value.size_bytes
        return not any(
            other is not None and 0 <= other.host_offset < end and offset < other.host_offset + other.size_bytes
            for other in others
        )


def _planned_bytes(alternatives: Sequence[Instructions]) -> int:
    return max(
        (
            value.host_offset + value.size_bytes
            for instructions in alternatives
            for value in instructions.values
            if value.host_offset >= 0
        ),
        default=0,
    )
