"""The allocation log: births and deaths of a thread's blocks, in order, with marks between them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from poochplan.errors import AllocatorError

from .library import ThreadScope, too_many

BIRTH, DEATH, MARK = 0, 1, 2
EVENT = np.dtype([("kind", np.int64), ("block", np.int64), ("size_bytes", np.int64), ("value", np.int64)])
"""One event. ``kind`` is BIRTH, DEATH or MARK; ``block`` a number in order of birth (-1 for a mark); ``size_bytes``
what was asked for, not rounded. ``value`` is a mark's own; of a birth 1 in an arena; of a death 1 on a thread that is
not of the scope."""

LIFETIME = np.dtype([("size_bytes", np.int64), ("point", np.int64), ("birth", np.int64), ("death", np.int64)])
"""One block that was born in a log: ``point`` is the value of the last mark before (0 before any), ``birth`` and
``death`` are indices of events, ``death`` -1 where the block outlived the log."""

Table = npt.NDArray[Any]


class AllocationLog:
    """A block in which what the calling thread allocates is written down, and its deaths on whichever thread; it joins
    the scope for that. Other threads of the scope may run steps of their own.

    State: open, or closed with its :attr:`events`. One log of a scope at a time.
    """

    def __init__(self, scope: ThreadScope) -> None:
        self._scope = scope
        self._library, self._handle = scope.library, scope.handle
        self._joined = scope.joined()
        self.events: Table = np.empty(0, EVENT)
        """Of type :data:`EVENT`, in order, once the block has ended."""

    def __enter__(self) -> AllocationLog:
        if not self._library.record_begin(self._handle):
            raise too_many()
        self._joined.__enter__()
        return self

    def mark(self, value: int) -> None:
        """Puts a mark between what was allocated so far and what will be: an op's number, or a point's."""
        self._library.record_mark(self._handle, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._joined.__exit__(kind, error, trace)
        count = self._library.record_end(self._handle)
        if count < 0:
            raise AllocatorError("expected memory for the log of allocations, found too little; log a shorter stretch")
        self.events = np.empty(count, EVENT)
        self._library.record_take(self._handle, self.events.ctypes.data, count)


def lifetimes(events: Table, smallest_bytes: int = 0) -> Table:
    """The blocks of ``smallest_bytes`` or more that were born in a log, in order of birth, of type :data:`LIFETIME`."""
    kind, block = events["kind"], events["block"]
    births = np.flatnonzero((kind == BIRTH) & (events["size_bytes"] >= smallest_bytes))
    deaths = np.flatnonzero(kind == DEATH)
    marks = np.flatnonzero(kind == MARK)
    found = np.empty(len(births), LIFETIME)
    found["size_bytes"], found["birth"] = events["size_bytes"][births], births
    before = np.searchsorted(marks, births)
    values = np.concatenate([np.zeros(1, np.int64), events["value"][marks]])
    found["point"] = values[before]
    found["death"] = -1
    order = deaths[np.argsort(block[deaths], kind="stable")]
    place = np.searchsorted(block[order], block[births])
    died = place < len(order)
    died[died] = block[order[place[died]]] == block[births[died]]
    found["death"][died] = order[place[died]]
    return found
