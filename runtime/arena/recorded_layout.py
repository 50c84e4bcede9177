"""ArenaRuns: runs allocated from an arena with places for them, or logged. The log of a run becomes a layout."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from poochplan.errors import AllocatorError
from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, LEAST_PLACED_BYTES
from poochplan.runtime.arena.arena import Arena, Places
from poochplan.runtime.arena.library import MARK, AllocationLog, Table, ThreadScope, lifetimes
from poochplan.runtime.run_report import ArenaReport
from poochplan.tensors.host_memory import give_back_freed

_lock = threading.Lock()
_logs: weakref.WeakValueDictionary[int, AllocationLog] = weakref.WeakValueDictionary()
"""The open log of each scope, by the scope's handle: one at a time in a process."""
PackBlocks: TypeAlias = Callable[[Sequence[tuple[int, int, int]], int], tuple[Sequence[int], int]]
"""Finds places, because the runtime itself cannot pack: offsets of blocks (born, died, bytes) in one arena, and its
bytes, at most so many if possible."""
_NOWHERE = Places(*(np.empty(0, np.int64) for _ in range(3)))
MOST_BLOCKS = 20_000
"""A run with more blocks gets no layout."""
RUN_END = -1
"""The mark at the end of a run; all other marks are points of its clock."""


class ArenaRuns:
    """State: one arena for runs of several kinds, once there was a layout, and the layout that it has now; the current
    or last run, and its log until :meth:`events` takes it.

    A run takes about the same blocks each time: a training step, or a pass of a model. The caller has its clock.
    ``scope`` contains the threads whose blocks are logged; None if nothing is logged.

    The arena's address space is as large as its largest layout so far. It takes the machine's memory only where runs
    have touched it, and no more than the budget of the followed plan leaves.
    """

    def __init__(self, scope: ThreadScope | None) -> None:
        self.arena: Arena | None = None
        """None also if there is no address space for it."""
        self._layout: RecordedLayout | None = None
        self._held_bytes = 0
        self._rests = False
        """Whether the machine got its memory back since the last run."""
        self._scope = scope
        self._log: AllocationLog | None = None
        self._goes_on = False
        self.has_places = False
        """Whether the blocks of the run that began last have places."""

    # -- a run ----------------------------------------------------------------------------------------------------

    def begin(
        self, layout: RecordedLayout | None, *, largest_bytes: int, room_bytes: int, log: bool, point: int = 0
    ) -> bool:
        """A run begins on this thread, by that layout or by none. Returns whether its blocks have places.

        Parameters
        ----------
        largest_bytes: of the arenas of all layouts that will come again.
        room_bytes: most bytes that the arena may take in a run of this layout.
        log: whether to log the run, unless another run is being logged: the next run is then as good an example.
        """
        self.has_places = self._lay(layout, largest_bytes, room_bytes)
        if self.has_places and self.arena is not None:
            try:
                self.arena.begin(point)
            except RuntimeError:  # another thread has closed it meanwhile
                self.has_places = False
        self._goes_on = True
        if log and self._scope is not None:
            self._write_down(self._scope, point)
        return self.has_places

    def _write_down(self, scope: ThreadScope, point: int) -> None:
        with _lock:
            if scope.handle in _logs:
                return
            self._log = _logs[scope.handle] = AllocationLog(scope)
            self._log.__enter__()
        if point:
            self._log.mark(point)

    @property
    def is_logged(self) -> bool:
        return self._log is not None

    def at(self, point: int) -> None:
        """The clock is at ``point`` of the layout that the run uses."""
        if self.has_places and self.arena is not None:
            self.arena.at(point)

    def fill_gaps(self) -> None:
        """Blocks of this run, and of later ones, take any free bytes of the arena where their places are not."""
        if self.has_places and self.arena is not None:
            self.arena.fill_gaps()

    def marks(self, point: int) -> None:
        """The clock is at ``point`` of the layout that the run's log becomes."""
        if self._log is not None:
            self._log.mark(point)

    def end(self) -> ArenaReport | None:
        """The run is over. Returns the fates of its blocks; None if they had no places. The log continues: a block in
        the arena that dies before the next run keeps its place until then.
        """
        if self._goes_on:
            self._goes_on = False
            self.marks(RUN_END)
            if self.has_places and self.arena is not None:
                self.arena.end()
        return self.fates

    @property
    def fates(self) -> ArenaReport | None:
        """The fates of the blocks of the run that began last; None if they had no places."""
        return self.arena.fates() if self.has_places and self.arena is not None else None

    @property
    def has_live_blocks(self) -> bool:
        """Whether blocks of earlier runs are alive in the arena."""
        return self.arena is not None and self.arena.live_blocks > 0

    def events(self) -> Table | None:
        """The log of the run that began last, which ends here; None if it was not logged."""
        if self._log is None:
            return None
        log, self._log = self._log, None
        log.__exit__(None, None, None)
        return log.events

    # -- the arena ------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Most memory that the arena holds during runs of the present layout; 0 without one, and at rest."""
        return self._held_bytes if self._layout is not None and not self._rests else 0

    def _lay(self, layout: RecordedLayout | None, largest_bytes: int, room_bytes: int) -> bool:
        """Gives the arena these places; None: its memory is freed. Returns whether a run can use them now."""
        self._rests = False
        if layout is self._layout:
            return layout is not None
        self._layout = None
        if layout is None:
            if self.arena is not None:
                self.arena.lay_out(_NOWHERE, kept_bytes=0)
            self._held_bytes = 0
            return False
        if self.arena is not None and self.arena.size_bytes < layout.arena_bytes:
            self.leave()
        kept_bytes = max(layout.arena_bytes, min(largest_bytes, room_bytes))
        try:
            if self.arena is None:
                self.arena = Arena(layout.places, max(largest_bytes, layout.arena_bytes), layout.least_bytes)
                give_back_freed()  # the freed memory of earlier runs is not used again
            else:
                self.arena.lay_out(layout.places, layout.least_bytes, min(kept_bytes, self.arena.size_bytes))
        except AllocatorError:  # no address space: the ordinary allocator requests less at a time
            return False
        self._layout = layout
        self._held_bytes = max(layout.arena_bytes, min(self._held_bytes, kept_bytes))
        return True

    def stands_aside(self) -> None:
        """The code that runs next has no places. The machine gets the arena's memory back, except for live blocks."""
        self.has_places = self._lay(None, 0, 0)

    def rests(self) -> None:
        """The machine gets the memory back until the next run, except for live blocks; the layout stays."""
        if self.arena is not None and self._layout is not None and not self._rests:
            self.arena.lay_out(self._layout.places, self._layout.least_bytes, kept_bytes=0)
            self._rests = True

    def leave(self) -> None:
        """The blocks in the arena stay, and another arena is made for the next runs."""
        self.close_arena()
        self.arena = self._layout = None
        self._held_bytes, self._rests = 0, False

    def close_arena(self) -> None:
        """The arena is not used any more. Its memory is freed with its last tensor; its counts can still be read."""
        self._rests = True  # there is nothing to give back any more
        if self.arena is not None:
            self.arena.close()

    def close(self) -> None:
        """The last run is over, and the arena is not used any more. Idempotent."""
        self.end()
        self.events()
        self.close_arena()


@dataclass(frozen=True, eq=False)
class RecordedLayout:
    places: Places
    arena_bytes: int
    least_bytes: int
    """Smaller blocks have no place."""
    separate_bytes: int
    """Sum of the blocks in the arena, as if each had a separate place."""
    live_bytes: int
    """Most bytes of them that are live at once: no arena is smaller."""


def recorded_blocks(events: Table, least_bytes: int) -> Table:
    """The blocks of at least that size that a run took, of type :data:`LIFETIME`; ``death`` is -1 if one outlives it.

    The log goes from the start of a run, or its first point, to that of the next run. The marks are the numbers of the
    points. After the run comes :data:`RUN_END`: a block that dies between the runs dies when the log ends, because by
    then the next run has begun. A log without that mark covers the run alone.
    """
    found = lifetimes(events, least_bytes)
    over = np.flatnonzero((events["kind"] == MARK) & (events["value"] == RUN_END))
    if not len(over):
        return found
    found = found[found["birth"] < over[0]]
    found["death"][found["death"] > over[0]] = len(events)
    return found


def layout_of_run(events: Table, pack: PackBlocks) -> RecordedLayout | None:
    """The layout of the blocks that a logged run took; None for more than :data:`MOST_BLOCKS`."""
    blocks = recorded_blocks(events, LEAST_PLACED_BYTES)
    return recorded_layout(blocks, LEAST_PLACED_BYTES, pack) if len(blocks) <= MOST_BLOCKS else None


def recorded_layout(blocks: Table, least_bytes: int, pack: PackBlocks, room_bytes: int = 0) -> RecordedLayout:
    """The layout of :func:`recorded_blocks`. Blocks that outlive the run lie outside."""
    dies = blocks["death"] >= 0
    died = blocks[dies]
    offsets, arena_bytes = pack([tuple(row) for row in died[["birth", "death", "size_bytes"]].tolist()], room_bytes)
    places = np.full(len(blocks), OUTSIDE, np.int64)
    places[dies] = offsets
    units = -(-died["size_bytes"] // ALLOCATION_UNIT_BYTES)
    live = occupancy(int(died["death"].max(initial=0)) + 1, (died["birth"], died["death"] - 1, units))
    return RecordedLayout(
        places=Places(sizes_bytes=blocks["size_bytes"].copy(), offsets=places, points=blocks["point"].copy()),
        arena_bytes=arena_bytes,
        least_bytes=least_bytes,
        separate_bytes=int(units.sum()) * ALLOCATION_UNIT_BYTES,
        live_bytes=int(live.max(initial=0)) * ALLOCATION_UNIT_BYTES,
    )
