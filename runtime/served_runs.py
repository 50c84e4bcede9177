"""ServedRuns: one run after another, served from an arena where it has places and written down where it is to be.
LaidArena: one arena for steps of several kinds, which are laid out in it in turn.

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
from poochplan.runtime.allocator.arena import Arena, Fates, Places
from poochplan.runtime.allocator.library import MARK, AllocationLog, Table, ThreadScope, lifetimes
from poochplan.tensors.host_memory import give_back_freed

_lock = threading.Lock()
_writers: dict[int, weakref.ref[ServedRuns]] = {}
"""Who writes a log of a scope, by its handle: one at a time in a process."""
_NOWHERE = Places(*(np.empty(0, np.int64) for _ in range(3)))
RUN_END = -1
"""The mark where a run is over; all others are points of its clock."""


class ServedRuns:
    """State: the arena; the run that goes on or was the last, and its log until :meth:`events` takes it.

    A run is whatever takes about the same blocks each time: a training step, a pass of a model. Its clock is the
    caller's. ``scope`` is of the threads whose blocks are written down; None where nothing is.
    """

    def __init__(self, scope: ThreadScope | None) -> None:
        self.laid = LaidArena()
        self._scope = scope
        self._log: AllocationLog | None = None
        self._is_served = self._goes_on = False

    @property
    def is_served(self) -> bool:
        """Whether the run that began last is one whose blocks have places."""
        return self._is_served

    def begin(
        self, layout: RecordedLayout | None, *, largest_bytes: int = 0, room_bytes: int = 0, log: bool, point: int = 0
    ) -> bool:
        """A run begins on this thread, by that layout or by none; whether it is served.

        ``largest_bytes`` and ``room_bytes`` are :meth:`LaidArena.lay`'s. With ``log`` it is written down, unless
        another is: then the next one is as good.
        """
        self._is_served = self.laid.lay(layout, largest_bytes, room_bytes) and self.laid.begin(point)
        self._goes_on = True
        if log:
            self._write_down(point)
        return self._is_served

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
            except AllocatorError:  # as many threads as can be are counted or logged already
                return
        if point:
            log.mark(point)

    @property
    def is_logged(self) -> bool:
        """Whether the run that began last is written down."""
        return self._log is not None

    def at(self, point: int) -> None:
        """The clock of the run that goes on is at ``point``."""
        self.serves_at(point)
        self.marks(point)

    def serves_at(self, point: int) -> None:
        """The clock is at ``point`` of the layout that the run is served by."""
        if self._is_served and self.laid.arena is not None:
            self.laid.arena.at(point)

    def marks(self, point: int) -> None:
        """The clock is at ``point`` of the layout that is made of the run's log."""
        if self._log is not None:
            self._log.mark(point)

    def end(self) -> Fates | None:
        """The run is over; what became of its blocks, None where they had no places. The log goes on: what lies in the
        arena and dies before the next run has its place until then.
        """
        if self._goes_on:
            self._goes_on = False
            if self._log is not None:
                self._log.mark(RUN_END)
            if self._is_served and self.laid.arena is not None:
                self.laid.arena.end()
        return self.fates

    @property
    def fates(self) -> Fates | None:
        """Of the blocks of the run that began last; None where they had no places."""
        return self.laid.arena.counts().step if self._is_served and self.laid.arena is not None else None

    def events(self) -> Table | None:
        """The log of the run that began last, which ends here; None where it was not written down."""
        if self._log is None:
            return None
        log, self._log = self._log, None
        log.__exit__(None, None, None)
        return log.events

    def stands_aside(self) -> None:
        """What runs next has no places: the machine has the arena's memory back for it, but for what lives."""
        self._is_served = self.laid.lay(None, 0, 0)

    def close(self) -> None:
        """Nothing is served any more; what lies in the arena stays as it is. Idempotent."""
        self.end()
        self.events()
        self.laid.close()


class LaidArena:
    """State: the arena, once there was something to lay out, and whose places it has now.

    Its address space is as large as the largest layout that it has had; the machine's memory is what steps have touched
    of it, and no more than the budget of the plan that is followed has room for.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        """None as well where there is no address space for it."""
        self._layout: RecordedLayout | None = None
        self._held_bytes = 0
        self._rests = False
        """Whether the machine has its memory back since the last step."""

    @property
    def held_bytes(self) -> int:
        """Of the machine's memory, at most, while steps of the present layout are served; 0 where none is, and while it
        rests.
        """
        return self._held_bytes if self._layout is not None and not self._rests else 0

    def lay(self, layout: RecordedLayout | None, largest_bytes: int, room_bytes: int) -> bool:
        """Has the places of ``layout`` for the steps that begin from here on; None is none, and its memory goes.

        Parameters
        ----------
        largest_bytes: of the arenas of all layouts that will come again.
        room_bytes: most that the arena may take in a step of this one.

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
                give_back_freed()  # what the steps before have left is not used again
            else:
                self.arena.lay_out(layout.places, layout.least_bytes, min(kept_bytes, self.arena.size_bytes))
        except AllocatorError:  # no address space: the ordinary allocator asks for less at a time
            return False
        self._layout = layout
        self._held_bytes = max(layout.arena_bytes, min(self._held_bytes, kept_bytes))
        return True

    def begin(self, point: int) -> bool:
        """A run begins that is served by its places, with the clock at ``point``; False where the arena was closed."""
        assert self.arena is not None
        try:
            self.arena.begin(point)
        except RuntimeError:  # by another thread, meanwhile
            return False
        return True

    def rests(self) -> None:
        """The machine has its memory back until the next step, but for what lives there; the layout stays."""
        if self.arena is not None and self._layout is not None and not self._rests:
            self.arena.lay_out(self._layout.places, self._layout.least_bytes, kept_bytes=0)
            self._rests = True

    def leave(self) -> None:
        """What lies in the arena stays in it, and another one is made for the steps that begin from here on."""
        self.close()
        self.arena = self._layout = None
        self._held_bytes, self._rests = 0, False

    def close(self) -> None:
        """Nothing is served any more; its memory goes with the last tensor in it. Its counts can still be read."""
        self._rests = True  # there is nothing to give back any more
        if self.arena is not None:
            self.arena.close()


class Pack(Protocol):
    """Finds places; the runtime does not know how."""

    def __call__(self, blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes; if it can be, no more
        than ``room_bytes``.
        """


@dataclass(frozen=True, eq=False)
class RecordedLayout:
    """Where the blocks of a run lie."""

    places: Places
    arena_bytes: int
    least_bytes: int
    """Smaller blocks have no place."""
    outside_bytes: int
    """Of the blocks that outlive the run, as they are asked for."""
    separate_bytes: int
    """Of the blocks in the arena, each with a place of its own."""
    live_bytes: int
    """Most of them that live at once: no arena is smaller."""


def recorded_blocks(events: Table, least_bytes: int) -> Table:
    """The blocks of at least that size which a run took, of type :data:`LIFETIME`; ``death`` -1 where one outlives it.

    The log goes from the begin of a run, or its first point, to that of the next one, with the number of each point as
    its mark. Behind the run is :data:`RUN_END`: what dies between the runs dies as the log ends, for by then the next
    one has begun. Without that mark the log is of the run alone.
    """
    found = lifetimes(events, least_bytes)
    over = np.flatnonzero((events["kind"] == MARK) & (events["value"] == RUN_END))
    if not len(over):
        return found
    found = found[found["birth"] < over[0]]
    found["death"][found["death"] > over[0]] = len(events)
    return found


def recorded_layout(blocks: Table, least_bytes: int, pack: Pack, room_bytes: int = 0) -> RecordedLayout:
    """The layout of :func:`recorded_blocks`; those that outlive the run lie outside."""
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
