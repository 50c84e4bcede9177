"""The places of values in the host tier. Planned values have planned offsets; others lie beside the planned bytes."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

from poochplan.formats.plan import Instructions
from poochplan.formats.profile_parts import host_aligned
from poochplan.runtime.devices.device import Interval

from .saved_value import SavedValue

QUIET_STEPS = 10
"""After this many steps in a row without a value beside the planned bytes, unused places there are released."""


class _Place(weakref.ref[SavedValue]):
    """Where a value lies beside the planned bytes."""

    offset = -1
    size_bytes = 0


class HostTier:
    """State: the values on the planned places, and those beside them. The tier has room for any of the instructions.

    A place beside the planned bytes is free again when its value dies or could not be written, even while a copy of it
    is still queued. The next value there is safe:

    * Copies out run in order on one stream. So the next value's bytes are written after those of the dead one.
    * The next value is fetched only after its own copy out was waited for, and that copy runs after the dead one's.
    * A copy back of the dead value may read the next one's bytes. Nothing reads the buffer that it fills.

    Values die on any thread, even on a copying thread when the garbage collector runs there. So death takes no lock and
    runs no Python: the dead reference goes into a queue, which the next placement processes.
    """

    def __init__(self, alternatives: Sequence[Instructions]) -> None:
        self._followed: Instructions | None = None
        self.planned_bytes = self._first = self._room_bytes = 0
        """The end of the planned places, their begin, and the bytes between."""
        self._occupants: dict[int, weakref.ref[SavedValue]] = {}
        self._of_others: list[weakref.ref[SavedValue]] = []
        """Values that other instructions have placed and may be alive: their places overlap with the present ones."""
        self._taken = Intervals()
        """The planned bytes and the places beside them, as occupied intervals."""
        self._places: dict[int, _Place] = {}
        """The values beside the planned bytes, by offset."""
        self._held: dict[int, int] = {}
        """The bytes that last beyond steps, by offset."""
        self._died: deque[_Place] = deque()
        self._placed_beside = False
        self._quiet_steps = 0
        self.grow(alternatives)

    def taken(self) -> list[Interval]:
        """The occupied intervals: every live value lies in one of them. The planned bytes are one interval."""
        self._free_the_dead()
        room = [(self._first, self.planned_bytes)] if self._room_bytes else []
        places = [(place.offset, place.offset + place.size_bytes) for place in self._places.values()]
        return room + places + [(first, first + size_bytes) for first, size_bytes in self._held.items()]

    def hold(self, size_bytes: int) -> int:
        """Takes bytes that last until :meth:`let_go`, beyond all steps. Returns their offset."""
        first = self._taken.take(size_bytes)
        self._held[first] = size_bytes
        return first

    def let_go(self, first: int) -> None:
        """The held bytes at that offset are free again."""
        self._taken.give_back(first, self._held.pop(first))

    def grow(self, alternatives: Sequence[Instructions]) -> Interval | None:
        """Steps may follow these instructions too from now on. Moves the planned bytes if they need more of them.

        No value is on the new planned bytes then. Values on the old ones stay, in places that are free when they die.
        """
        planned = (value for one in alternatives for value in one.values if value.host_offset >= 0)
        room_bytes = max((value.host_offset + value.size_bytes for value in planned), default=0)
        if room_bytes <= self._room_bytes:
            return None
        self._free_the_dead()
        places, taken = dict(self._places), Intervals()
        for reference in (*self._of_others, *self._occupants.values()):
            value = reference()
            if value is not None and value.host_offset >= 0:  # on the planned bytes, until it dies
                places[value.host_offset] = self._place_at(value.host_offset, value)
        for place in places.values():
            taken.take_at(place.offset, place.size_bytes)
        for held, held_bytes in self._held.items():
            taken.take_at(held, held_bytes)
        first = taken.take(room_bytes)
        self._followed, self._occupants, self._of_others = None, {}, []
        self._taken, self._places = taken, places
        self._first, self._room_bytes, self.planned_bytes = first, room_bytes, first + room_bytes
        return first, first + room_bytes

    def _place_at(self, offset: int, value: SavedValue) -> _Place:
        place = _Place(value, self._died.append)
        place.offset, place.size_bytes = offset, value.size_bytes
        return place

    def follow(self, instructions: Instructions) -> None:
        """Values are placed by these instructions from now on."""
        if instructions is self._followed:
            return
        self._followed = instructions
        before = (*self._of_others, *self._occupants.values())
        self._of_others = [reference for reference in before if reference() is not None]
        self._occupants = {}

    def step_begins(self) -> bool:
        """Returns whether the bytes outside ``taken`` have been unused for long, and are to be released now."""
        self._quiet_steps = 0 if self._placed_beside else self._quiet_steps + 1
        self._placed_beside = False
        return self._quiet_steps > 0 and self._quiet_steps % QUIET_STEPS == 0

    def place(self, value: SavedValue) -> int:
        """Byte offset for the value: its planned place, unless a value of an earlier step is still there."""
        planned = -1
        if self._followed is not None and value.index is not None:
            planned = self._followed.values[value.index].host_offset
            planned += self._first if planned >= 0 else 0
        if planned >= 0 and self._is_free(planned, value):
            self._occupants[planned] = weakref.ref(value)
            return planned
        self._free_the_dead()
        self._placed_beside = True
        offset = self._taken.take(value.size_bytes)
        self._places[offset] = self._place_at(offset, value)
        return offset

    def free_place(self, offset: int) -> None:
        """The value that was placed at ``offset`` is dead, or could not be written and its copy has ended."""
        place = self._places.pop(offset, None)
        if place is not None:  # a planned place is reserved for its value
            self._taken.give_back(offset, place.size_bytes)

    def _free_the_dead(self) -> None:
        while self._died:
            self.free_place(self._died.popleft().offset)

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


_NO_END = sys.maxsize


class Intervals:
    """Intervals of bytes, one after another. They are taken at the lowest free place that fits, and given back.

    State: the free holes as (first byte, byte after the hole), lowest first; the last one has no end.

    Taking examines only the holes. Giving back finds its neighbours by bisection.
    """

    def __init__(self) -> None:
        self._holes = [(0, _NO_END)]

    def take(self, size_bytes: int) -> int:
        """The first byte of an interval of that size, which is rounded up to the alignment of host memory."""
        size_bytes = _rounded(size_bytes)
        index, (start, end) = next(
            (index, hole) for index, hole in enumerate(self._holes) if hole[1] - hole[0] >= size_bytes
        )
        behind = start + size_bytes
        self._holes[index : index + 1] = [(behind, end)] if behind < end else []
        return start

    def take_at(self, start: int, size_bytes: int) -> None:
        """Takes the interval of that size at ``start``, which is free."""
        end = start + _rounded(size_bytes)
        index = bisect_right(self._holes, (start, _NO_END)) - 1
        first, behind = self._holes[index]
        assert first <= start, "another interval ends behind its start"
        assert end <= behind, "another interval begins before its end"
        self._holes[index : index + 1] = [hole for hole in ((first, start), (end, behind)) if hole[0] < hole[1]]

    def give_back(self, start: int, size_bytes: int) -> None:
        """The interval that was taken at ``start`` with this size is free again; holes that touch become one."""
        end = start + _rounded(size_bytes)
        first = behind = bisect_left(self._holes, (start,))
        if first > 0 and self._holes[first - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if self._holes[behind][0] == end:
            end = self._holes[behind][1]
            behind += 1
        self._holes[first:behind] = [(start, end)]


def _rounded(size_bytes: int) -> int:
    return host_aligned(max(1, size_bytes))  # an empty value has a place too: no two share a first byte
