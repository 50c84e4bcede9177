"""Arena: a single block of memory, from which a step's blocks are allocated at their planned places."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from poochplan.errors import AllocatorError
from poochplan.formats.occupancy import Ints
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, LEAST_PLACED_BYTES
from poochplan.tensors.storages import new_storage

from ..run_report import ArenaReport, Unserved
from .library import library

_MOST_UNSERVED = 8
_FATES = "served", "unplanned", "taken"
"""The outcomes for a block, in the order of the library."""


@dataclass(frozen=True)
class Places:
    """The blocks that a step allocates, in order of birth; arrays of one length.

    A block's place is ``offsets`` to ``offsets + sizes_bytes``, rounded up to the allocation unit.
    """

    sizes_bytes: Ints
    """As requested."""
    offsets: Ints
    """Multiples of the allocation unit, or :data:`OUTSIDE`."""
    points: Ints
    """Per block: the point of the clock after which it is allocated; never decreasing."""


class Arena:
    """``size_bytes`` of memory, and the places in it. State: open or closed; in a step or between two.

    Bytes in use are never handed out, even if a step differs from the plan. The memory is released when the arena is
    closed or no longer referenced, and the last tensor in it has died.

    Raises
    ------
    ValueError
        The arrays of the places differ in length, places lie beyond ``size_bytes``, or points decrease.
    AllocatorError
        There is no address space for it, or no library.
    """

    def __init__(self, places: Places, size_bytes: int, smallest_bytes: int = LEAST_PLACED_BYTES) -> None:
        self._library = library()
        handle = self._library.arena_new(size_bytes)
        if handle is None:
            raise AllocatorError(
                f"expected {size_bytes} bytes of address space for the arena, found less; raise ulimit -v"
            )
        self._handle: int = handle
        self.size_bytes = size_bytes
        self._drop = weakref.finalize(self, self._library.arena_drop, handle)
        self._drop.atexit = False
        self.lay_out(places, smallest_bytes)

    def lay_out(self, places: Places, smallest_bytes: int = LEAST_PLACED_BYTES, kept_bytes: int | None = None) -> None:
        """Sets other places for the next steps. Live blocks in the arena stay where they are.

        ``kept_bytes``: memory after these bytes is released, except for live blocks; by default all memory is kept.

        Raises ``ValueError`` like a new arena, and ``RuntimeError`` within a step or if the arena is closed.
        """
        sizes, offsets, points = _checked(places, self.size_bytes)
        at = sizes.ctypes.data, offsets.ctypes.data, points.ctypes.data
        kept_bytes = self.size_bytes if kept_bytes is None else kept_bytes
        if not self._library.arena_lay_out(self._handle, len(sizes), *at, smallest_bytes, kept_bytes):
            raise RuntimeError("expected an open arena between two steps, found one that serves or is closed")

    def begin(self, point: int = 0) -> None:
        """Blocks of this thread come from it from here on, as a new step whose clock is at ``point``.

        Raises ``RuntimeError`` if the arena is closed.
        """
        if not self._library.arena_begin(self._handle, point):
            raise RuntimeError("expected an open arena, found one that was closed; make another")

    def at(self, point: int) -> None:
        """The clock is at ``point``: the sequence continues with the blocks after it, at any earlier position."""
        self._library.arena_at(self._handle, point)

    def fill_gaps(self) -> None:
        """From here on a block whose own place is missing or in use takes any gap between the live blocks."""
        self._library.arena_fill_gaps(self._handle)

    def note(self, storage: torch.UntypedStorage) -> int:
        """A number by which :meth:`again` finds it once it has died; 0 if it is not here, or no gaps are filled."""
        return self._library.arena_note(self._handle, storage.data_ptr())

    def again(self, note: int, size_bytes: int) -> torch.UntypedStorage | None:
        """The noted storage of that size, if it has died in this step and nothing has touched its bytes since."""
        address = self._library.arena_again(self._handle, note, size_bytes)
        found = new_storage(size_bytes, torch.device("cpu")) if address else None
        return found if found is not None and found.data_ptr() == address else None  # else on another thread

    def end(self) -> None:
        """The step is over: no thread uses the arena any more."""
        self._library.arena_end(self._handle)

    @contextlib.contextmanager
    def step(self, point: int = 0) -> Iterator[None]:
        """A block of code that is one step on this thread, from :meth:`begin` to :meth:`end`."""
        self.begin(point)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """No blocks come from it any more. The memory is released with the last tensor in it. Idempotent."""
        self._drop()

    def fates(self) -> ArenaReport:
        """Of the blocks of the running or last step, without their layers."""
        counts = np.zeros((len(_FATES), 2), np.int64)
        self._library.arena_counts(self._handle, counts.ctypes.data)
        (served, served_bytes), (unplanned, unplanned_bytes), (taken, taken_bytes) = counts.tolist()
        return ArenaReport(
            served=served,
            served_bytes=served_bytes,
            unplanned=unplanned,
            unplanned_bytes=unplanned_bytes,
            taken=taken,
            taken_bytes=taken_bytes,
        )

    def report(self, size_bytes: int, layer_at: Callable[[int], str]) -> ArenaReport:
        """Of the last step; ``layer_at`` names the layer at a point of its clock."""
        rows = np.zeros((_MOST_UNSERVED, 3), np.int64)
        count = self._library.arena_misses(self._handle, rows.ctypes.data, _MOST_UNSERVED)
        unserved = [
            Unserved(size_bytes=block_bytes, layer=layer_at(point), why=_FATES[fate])
            for fate, block_bytes, point in rows[:count].tolist()
        ]
        return msgspec.structs.replace(self.fates(), size_bytes=size_bytes, unserved=unserved)

    @property
    def live_blocks(self) -> int:
        return self._library.arena_live_blocks(self._handle)


def _checked(places: Places, size_bytes: int) -> tuple[Ints, Ints, Ints]:
    given = places.sizes_bytes, places.offsets, places.points
    sizes, offsets, points = (np.ascontiguousarray(array, dtype=np.int64) for array in given)
    if not len(sizes) == len(offsets) == len(points):
        raise ValueError(
            f"expected arrays of one length, found {len(sizes)} sizes, {len(offsets)} offsets, {len(points)} points"
        )
    inside = offsets != OUTSIDE
    ends = offsets + -(-sizes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES
    wrong = (sizes < 1) | (inside & ((offsets < 0) | (offsets % ALLOCATION_UNIT_BYTES != 0) | (ends > size_bytes)))
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"place {at}: expected bytes at a multiple of {ALLOCATION_UNIT_BYTES} within {size_bytes}, "
            f"found {sizes[at]} at {offsets[at]}"
        )
    if len(points) and (np.diff(points) < 0).any():
        at = int((np.diff(points) < 0).argmax()) + 1
        raise ValueError(f"place {at}: expected points that never decrease, found {points[at]} after {points[at - 1]}")
    return sizes, offsets, points
