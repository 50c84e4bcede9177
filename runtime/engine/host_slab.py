"""The host slab: where in the host tier each value goes. Planned offsets first; what is not planned goes behind."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from poochplan.formats.plan import Instructions, host_aligned

from .saved_value import SavedValue


class HostSlab:
    """State: who occupies each planned place, and who lies behind them. Large enough for any of the instructions."""

    def __init__(self, alternatives: Sequence[Instructions]) -> None:
        self._followed = alternatives[0]
        self.planned_bytes = max(
            (
                value.host_offset + value.size_bytes
                for instructions in alternatives
                for value in instructions.values
                if value.host_offset >= 0
            ),
            default=0,
        )
        self._occupants: dict[int, weakref.ref[SavedValue]] = {}
        self._of_others: list[weakref.ref[SavedValue]] = []
        """Who was placed by other instructions and may still be there: its places overlap with those of this one."""
        self._unplanned: weakref.WeakSet[SavedValue] = weakref.WeakSet()

    def follow(self, instructions: Instructions) -> None:
        """From now on values are placed by these."""
        if instructions is self._followed:
            return
        self._followed = instructions
        before = (*self._of_others, *self._occupants.values())
        self._of_others = [reference for reference in before if reference() is not None]
        self._occupants = {}

    def place(self, value: SavedValue) -> int:
        """Byte offset for the value: its planned place unless somebody of an earlier step is still there."""
        planned = self._followed.values[value.index].host_offset if value.index is not None else -1
        if planned >= 0 and self._is_free(planned, value):
            self._occupants[planned] = weakref.ref(value)
            return planned
        end = max((other.host_offset + other.size_bytes for other in self._unplanned), default=0)
        self._unplanned.add(value)
        return host_aligned(max(end, self.planned_bytes))

    def _is_free(self, offset: int, value: SavedValue) -> bool:
        reference = self._occupants.get(offset)
        occupant = reference() if reference is not None else None
        if occupant is not None and occupant is not value and occupant.host_offset == offset:  # or its copy has failed
            return False
        others = (reference() for reference in self._of_others)
        end = offset + value.size_bytes
        return not any(
            other is not None and 0 <= other.host_offset < end and offset < other.host_offset + other.size_bytes
            for other in others
        )
