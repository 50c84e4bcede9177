"""Arena: a single block of memory, from which a step's blocks are allocated at their planned places."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from poochplan.errors import AllocatorError
from poochplan.formats.occupancy import Ints
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, LEAST_PLACED_BYTES

from ..run_report import ArenaReport, Unserved
from .library import library

_MOST_MISSES = 64
MOST_UNSERVED = 8


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


class BlockCount(NamedTuple):
    """Number of blocks, and their requested bytes."""

    blocks: int
    size_bytes: int


class Fates(NamedTuple):
    """The outcomes for the blocks of at least the arena's smallest size."""

    served: BlockCount
    outside: BlockCount
    """Served by the ordinary allocator, as planned."""
    unplanned: BlockCount
    """Served by the ordinary allocator, because no block of this size was expected here."""
    taken: BlockCount
    """Served by the ordinary allocator, because bytes of their place were in use."""
    unmet: BlockCount
    """Expected, but not requested."""

    @property
    def missed_blocks(self) -> int:
        """Number of blocks that lay outside contrary to the layout. Expected blocks that did not come do no harm."""
        return self.taken.blocks + self.unplanned.blocks


class Miss(NamedTuple):
    """A block that the ordinary allocator served, unlike planned."""

    fate: str
    """``unplanned`` or ``taken``."""
    size_bytes: int
    point: int
    """The clock's last point."""
    place: int
    """The index of the next expected place."""


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
        sizes, offsets, points = _checked(places, size_bytes)
        self._library = library()
        at = sizes.ctypes.data, offsets.ctypes.data, points.ctypes.data
        handle = self._library.arena_new(len(sizes), *at, size_bytes, smallest_bytes)
        if handle is None:
            raise AllocatorError(
                f"expected {size_bytes} bytes of address space for the arena, found less; raise ulimit -v"
            )
        self._handle: int = handle
        self.size_bytes = size_bytes
        self._drop = weakref.finalize(self, self._library.arena_drop, handle)
        self._drop.atexit = False

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

    def end(self) -> None:
        """The step is over: no thread uses the arena any more, and blocks that did not come count as unmet."""
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

    def fates(self) -> Fates:
        """Of the blocks of the running or last step."""
        numbers = np.zeros((len(Fates._fields), 2), np.int64)
        self._library.arena_counts(self._handle, numbers.ctypes.data)
        return Fates(*(BlockCount(*row) for row in numbers.tolist()))

    def report(self, size_bytes: int, layer_at: Callable[[int], str]) -> ArenaReport:
        """Of the last step; ``layer_at`` names the layer at a point of its clock."""
        step = self.fates()
        first = self.misses()[:MOST_UNSERVED]
        return ArenaReport(
            size_bytes=size_bytes,
            served=step.served.blocks,
            served_bytes=step.served.size_bytes,
            unplanned=step.unplanned.blocks,
            unplanned_bytes=step.unplanned.size_bytes,
            taken=step.taken.blocks,
            taken_bytes=step.taken.size_bytes,
            unserved=[Unserved(size_bytes=one.size_bytes, layer=layer_at(one.point), why=one.fate) for one in first],
        )

    def misses(self) -> list[Miss]:
        """The first 64 blocks of the step that did not get their places, in order."""
        rows = np.zeros((_MOST_MISSES, 4), np.int64)
        count = self._library.arena_misses(self._handle, rows.ctypes.data, _MOST_MISSES)
        return [Miss(Fates._fields[fate], *numbers) for fate, *numbers in rows[:count].tolist()]

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
