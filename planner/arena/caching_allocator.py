"""A model of PyTorch's caching allocator: the bytes that it reserves on a GPU for a sequence of requests.

The rules and constants are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` with
default settings (``round_size``, ``get_pool``, ``get_allocation_size``, ``get_free_block``, ``should_split``,
``try_merge_blocks``), for one stream and unlimited memory: no segment is released. Segments get ascending addresses,
which decides between free blocks of one size; a driver's addresses may differ. It needs neither torch nor a GPU.

With expandable segments (``try_allocate_expandable_block``) each pool is one segment that grows at its end, by pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poochplan.formats.profile_parts import rounded_up

from .packing import Block

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
"""Requests up to this come from the small pool."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
"""Segment for requests of the large pool below ``MIN_LARGE_BYTES``."""
MIN_LARGE_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
BEHIND_FIXED = 1 << 50
"""Address of a segment that grows."""


class Reserved(NamedTuple):
    """Peaks of a sequence of requests."""

    reserved_bytes: int
    """Bytes of all segments."""
    allocated_bytes: int
    """Bytes in blocks that were handed out, including remainders too small to be split off."""


@dataclass(eq=False)
class _Piece:
    """A block of a segment, free or handed out."""

    address: int
    size_bytes: int
    is_small: bool
    expands: bool = False
    """Whether its segment is one that grows."""
    is_free: bool = True
    before: _Piece | None = None
    after: _Piece | None = None

    def key(self) -> tuple[int, int]:
        return self.size_bytes, self.address


class CachingAllocator:
    """Hands out blocks of cached segments, best fit first. ``peak`` has its largest size."""

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        """Whether new segments grow; it may change."""
        self._last: dict[bool, _Piece | None] = {True: None, False: None}
        """By whether they are small: the last piece of a segment that grows."""
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak = Reserved(0, 0)
        self._free: dict[bool, list[_Piece]] = {True: [], False: []}
        """By whether they are small: free pieces by size, then by address."""

    def allocate(self, size_bytes: int) -> _Piece:
        """A block of at least ``size_bytes``; give it to :meth:`free` later."""
        size = max(MIN_BLOCK_BYTES, rounded_up(size_bytes, MIN_BLOCK_BYTES))
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        found = bisect_left(free, (size, 0), key=_Piece.key)
        if self.is_expandable and found + 1 < len(free) and free[found] is self._last[is_small]:
            found += 1  # the last piece could grow, so it is the largest
        if found < len(free):
            piece = free.pop(found)
        else:
            piece = self._grown(size, is_small) if self.is_expandable else self._new_segment(size, is_small)
        left = piece.size_bytes - size
        if left >= MIN_BLOCK_BYTES if is_small or self.is_expandable else left > SMALL_BYTES:
            rest = _Piece(piece.address + size, left, is_small, piece.expands, before=piece, after=piece.after)
            if rest.after is not None:
                rest.after.before = rest
            elif piece.expands:
                self._last[is_small] = rest
            piece.size_bytes, piece.after = size, rest
            insort(free, rest, key=_Piece.key)
        piece.is_free = False
        self.allocated_bytes += piece.size_bytes
        reserved, allocated = self.peak
        self.peak = Reserved(max(reserved, self.reserved_bytes), max(allocated, self.allocated_bytes))
        return piece

    def free(self, piece: _Piece) -> None:
        """Takes a block back, and joins it with free neighbours of its segment."""
        assert not piece.is_free, "the block is free already"
        self.allocated_bytes -= piece.size_bytes
        piece.is_free = True
        free = self._free[piece.is_small]
        for beside in (piece.before, piece.after):
            if beside is not None and beside.is_free:
                del free[bisect_left(free, beside.key(), key=_Piece.key)]
                piece = self._joined(beside, piece) if beside.address < piece.address else self._joined(piece, beside)
        insort(free, piece, key=_Piece.key)

    def _new_segment(self, size: int, is_small: bool) -> _Piece:
        if is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = rounded_up(size, ROUND_LARGE_BYTES)
        piece = _Piece(self.reserved_bytes, segment_bytes, is_small)
        self.reserved_bytes += segment_bytes
        return piece

    def _grown(self, size: int, is_small: bool) -> _Piece:
        """The end of the segment that grows by pages, with its last piece if that is free."""
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        last = self._last[is_small]
        if last is not None and last.is_free:
            free = self._free[is_small]
            del free[bisect_left(free, last.key(), key=_Piece.key)]
        else:
            end = last.address + last.size_bytes if last is not None else BEHIND_FIXED
            piece = _Piece(end, 0, is_small, expands=True, before=last)
            if last is not None:
                last.after = piece
            last = self._last[is_small] = piece
        more_bytes = rounded_up(size - last.size_bytes, page_bytes)
        last.size_bytes += more_bytes
        self.reserved_bytes += more_bytes
        return last

    def _joined(self, first: _Piece, second: _Piece) -> _Piece:
        first.size_bytes += second.size_bytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        elif first.expands:
            self._last[first.is_small] = first
        return first


def peak_reserved(
    before: Sequence[Block],
    step: Sequence[Block],
    end: int,
    *,
    made_by_first: Sequence[Block] = (),
    is_expandable: bool = False,
) -> Reserved:
    """Peaks when a step is run three times. Blocks from ``before`` it are allocated first, then those of the ``step``.
    Segments expand from the step on: a session sets that, and finds model and inputs there.

    Blocks from before that do not live to ``end`` are allocated anew before each further step. Blocks that the step
    takes and does not free are freed when it ends. ``made_by_first``: blocks that the first step takes and that stay,
    such as the optimizer's state.
    """
    allocator = CachingAllocator()
    for block in before:
        if block.end >= end:
            allocator.allocate(block.size_bytes)
    allocator.is_expandable = is_expandable
    passing = [block for block in before if block.end < end]
    blocks = [*passing, *step]
    events = [(block.start, True, number) for number, block in enumerate(blocks)]
    events += [(block.end, False, number) for number, block in enumerate(blocks)]
    events.sort()  # at one time, ends come before starts
    made = [(block.start, True, len(blocks) + number) for number, block in enumerate(made_by_first)]
    _run(allocator, sorted(events + made), [*blocks, *made_by_first], {})
    for _ in range(2):
        _run(allocator, events, blocks, {})
    return allocator.peak


def _run(
    allocator: CachingAllocator,
    events: Sequence[tuple[int, bool, int]],
    blocks: Sequence[Block],
    held: dict[int, _Piece],
) -> None:
    for _, is_start, number in events:
        if is_start:
            held[number] = allocator.allocate(blocks[number].size_bytes)
        else:
            allocator.free(held.pop(number))
