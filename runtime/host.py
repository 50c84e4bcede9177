"""The host slab: where in the host tier each value goes. Planned offsets first; what is not planned goes behind."""

from __future__ import annotations

import weakref

from ..planner.schema import Plan
from .entry import Entry

ALIGNMENT_BYTES = 4096


class HostSlab:
    """State: who occupies each planned place, and who lies behind them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.planned_bytes = max(
            (value.host_offset + value.size_bytes for value in plan.values if value.host_offset >= 0), default=0
        )
        self._occupants: dict[int, weakref.ref[Entry]] = {}
        self._unplanned: weakref.WeakSet[Entry] = weakref.WeakSet()

    def place(self, entry: Entry) -> int:
        """Byte offset for the value: its planned place unless somebody of an earlier step is still there."""
        planned = self._plan.values[entry.index].host_offset if entry.index is not None else -1
        if planned >= 0:
            reference = self._occupants.get(planned)
            occupant = reference() if reference is not None else None
            if occupant is None or occupant is entry or occupant.host_offset != planned:  # the last: its copy failed
                self._occupants[planned] = weakref.ref(entry)
                return planned
        end = max((other.host_offset + other.size_bytes for other in self._unplanned), default=0)
        self._unplanned.add(entry)
        return -(-max(end, self.planned_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
