"""ServedRuns: one run after another, served from an arena where it has places and written down where it is to be."""

from __future__ import annotations

import threading
import weakref

from poochplan.errors import AllocatorError
from poochplan.runtime.allocator.allocation_log import AllocationLog, Table
from poochplan.runtime.allocator.arena import Fates
from poochplan.runtime.allocator.scope import ThreadScope

from .laid_arena import LaidArena
from .recorded_layout import RUN_END, RecordedLayout

_lock = threading.Lock()
_writers: dict[int, weakref.ref[ServedRuns]] = {}
"""Who writes a log of a scope, by its handle: one at a time in a process."""


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
