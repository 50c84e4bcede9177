"""ServedRuns: runs one after another, allocated from an arena if it has places for them, and logged if requested.
LaidArena: one arena for steps of several kinds, whose layouts it takes in turn.

The log of a run becomes a layout.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from poochplan.errors import AllocatorError
from poochplan.formats.occupancy import occupancy
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.runtime.arena.arena import Arena, Fates, Places
from poochplan.runtime.arena.library import MARK, AllocationLog, Table, ThreadScope, lifetimes
from poochplan.tensors.host_memory import give_back_freed

_lock = threading.Lock()
_writers: dict[int, weakref.ref[ServedRuns]] = {}
"""The writer of each scope's log, by the scope's handle: one at a time in a process."""
_NOWHERE = Places(*(np.empty(0, np.int64) for _ in range(3)))
RUN_END = -1
"""The mark at the end of a run; all other marks are points of its clock."""


class ServedRuns:
    """State: the arena; the current or last run, and its log until :meth:`events` takes it.

    A run takes about the same blocks each time: a training step, or a pass of a model. The caller has its clock.
    ``scope`` contains the threads whose blocks are logged; None if nothing is logged.
    """

    def __init__(self, scope: ThreadScope | None) -> None:
        self.laid = LaidArena()
        self._scope = scope
        self._log: AllocationLog | None = None
        self._goes_on = False
        self.is_served = False
        """Whether the blocks of the run that began last have places."""

    def begin(
        self, layout: RecordedLayout | None, *, largest_bytes: int = 0, room_bytes: int = 0, log: bool, point: int = 0
    ) -> bool:
        """A run begins on this thread, by that layout or by none. Returns whether it is served.

        ``largest_bytes`` and ``room_bytes`` are those of :meth:`LaidArena.lay`. With ``log`` the run is logged, unless
        another run is being logged: the next run is then as good an example.
        """
        self.is_served = self.laid.lay(layout, largest_bytes, room_bytes) and self.laid.begin(point)
        self._goes_on = True
        if log:
            self._write_down(point)
        return self.is_served

    def _write_down(self, point: int) -> None:
        if self._scope is None:
            return
        with _lock:
            known = _writers.get(self._scope.handle)
            other = known() if known is not None else None
            if other is not None and other is not self and other._log is not None:
                return
            _writers[self._scope.handle] = weakref.ref(self)
            log = AllocationLog(self._scope)
            try:
                self._log = log.__enter__()
            except AllocatorError:  # too many scopes are counted or logged already
                return
        if point:
            log.mark(point)

    @property
    def is_logged(self) -> bool:
        """Whether the run that began last is logged."""
        return self._log is not None

    def at(self, point: int) -> None:
        """The clock of the current run is at ``point``."""
        self.serves_at(point)
        self.marks(point)

    def serves_at(self, point: int) -> None:
        """The clock is at ``point`` of the layout that serves the run."""
        if self.is_served and self.laid.arena is not None:
            self.laid.arena.at(point)

    def marks(self, point: int) -> None:
        """The clock is at ``point`` of the layout that the run's log becomes."""
        if self._log is not None:
            self._log.mark(point)

    def end(self) -> Fates | None:
        """The run is over. Returns the fates of its blocks; None if they had no places. The log continues: a block in
        the arena that dies before the next run keeps its place until then.
        """
        if self._goes_on:
            self._goes_on = False
            if self._log is not None:
                self._log.mark(RUN_END)
            if self.is_served and self.laid.arena is not None:
                self.laid.arena.end()
        return self.fates

    @property
    def fates(self) -> Fates | None:
        """The fates of the blocks of the run that began last; None if they had no places."""
        return self.laid.arena.counts().step if self.is_served and self.laid.arena is not None else None

    def events(self) -> Table | None:
        """The log of the run that began last, which ends here; None if it was not logged."""
        if self._log is None:
            return None
        log, self._log = self._log, None
        log.__exit__(None, None, None)
        return log.events

    def stands_aside(self) -> None:
        """The code that runs next has no places. The machine gets the arena's memory back for it, except for live
        blocks.
        """
        self.is_served = self.laid.lay(None, 0, 0)

    def close(self) -> None:
        """Nothing is served any more; blocks in the arena stay. Idempotent."""
        self.end()
        self.events()
        self.laid.close()


class LaidArena:
    """State: the arena, once there was a layout, and the layout that it has now.

    Its address space is as large as its largest layout so far. It takes the machine's memory only where steps have
    touched it, and no more than the budget of the followed plan leaves.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        """None also if there is no address space for it."""
        self._layout: RecordedLayout | None = None
        self._held_bytes = 0
        self._rests = False
        """Whether the machine got its memory back since the last step."""

    @property
    def held_bytes(self) -> int:
        """The most memory of the machine that it holds while steps of the present layout are served; 0 without a
        layout, and while it rests.
        """
        return self._held_bytes if self._layout is not None and not self._rests else 0

    def lay(self, layout: RecordedLayout | None, largest_bytes: int, room_bytes: int) -> bool:
        """Gives the arena the places of ``layout`` for the next steps. None means no layout, and the arena's memory is
        freed.

        Parameters
        ----------
        largest_bytes: of the arenas of all layouts that will come again.
        room_bytes: most bytes that the arena may take in a step of this layout.

        Returns whether a step can be served now.
        """
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
                give_back_freed()  # the freed memory of earlier steps is not used again
            else:
                self.arena.lay_out(layout.places, layout.least_bytes, min(kept_bytes, self.arena.size_bytes))
        except AllocatorError:  # no address space: the ordinary allocator requests less at a time
            return False
        self._layout = layout
        self._held_bytes = max(layout.arena_bytes, min(self._held_bytes, kept_bytes))
        return True

    def begin(self, point: int) -> bool:
        """A run begins that is served by its places, with the clock at ``point``. False if the arena was closed."""
        assert self.arena is not None
        try:
            self.arena.begin(point)
        except RuntimeError:  # by another thread, meanwhile
            return False
        return True

    def rests(self) -> None:
        """The machine gets the memory back until the next step, except for live blocks; the layout stays."""
        if self.arena is not None and self._layout is not None and not self._rests:
            self.arena.lay_out(self._layout.places, self._layout.least_bytes, kept_bytes=0)
            self._rests = True

    def leave(self) -> None:
        """The blocks in the arena stay, and another arena is made for the next steps."""
        self.close()
        self.arena = self._layout = None
        self._held_bytes, self._rests = 0, False

    def close(self) -> None:
        """Nothing is served any more; the memory is freed with the last tensor in it. Its counts can still be read."""
        self._rests = True  # there is nothing to give back any more
        if self.arena is not None:
            self.arena.close()


class Pack(Protocol):
    """A function that finds places; the runtime itself cannot pack."""

    def __call__(self, blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and the arena's bytes: no more than
        ``room_bytes``, if possible.
        """


@dataclass(frozen=True, eq=False)
class RecordedLayout:
    """The places of the blocks of a run."""

    places: Places
    arena_bytes: int
    least_bytes: int
    """Smaller blocks have no place."""
    outside_bytes: int
    """Bytes of the blocks that outlive the run, as requested."""
    separate_bytes: int
    """Sum of the blocks in the arena, as if each had a separate place."""
    live_bytes: int
    """Most bytes of them that are live at once: no arena is smaller."""


def recorded_blocks(events: Table, least_bytes: int) -> Table:
    """The blocks of at least that size that a run took, of type :data:`LIFETIME`; ``death`` is -1 for a block that
    outlives it.

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


def recorded_layout(blocks: Table, least_bytes: int, pack: Pack, room_bytes: int = 0) -> RecordedLayout:
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
        outside_bytes=int(blocks["size_bytes"][~dies].sum()),
        separate_bytes=int(units.sum()) * ALLOCATION_UNIT_BYTES,
        live_bytes=int(live.max(initial=0)) * ALLOCATION_UNIT_BYTES,
    )
