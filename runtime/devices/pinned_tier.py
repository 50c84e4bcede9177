"""The host tier of the CUDA device: pinned where a plan wants it, and in pages where a value first needs one.

A plan's bytes are one slab, of their exact size, where nothing was pinned before. Where a loop has swapped without a
plan, its pages lie there already, and are used as they are; so is the slab of a smaller plan. Only what is missing is
pinned. So nothing that a copy could still read or write is ever given back to make room for a plan.

A value may lie on several pieces: it is copied in parts.

Pinning a page takes longer than filling it. So a thread pins ahead of the first steps: as many pages as there are, at
most :data:`MOST_AHEAD`. What nobody needed goes when pages are given back, or with the tier.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, Protocol, TypeVar

from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes

from .device import Interval

PAGE_BYTES = 64 << 20
MOST_AHEAD = 8
SHARE_OF_AVAILABLE = 0.75
"""Of the host memory that is available when the first page is pinned, the pages take no more than this."""


class Memory(Protocol):
    """``size_bytes`` of host memory; see ``PinnedMemory``."""

    size_bytes: int

    def free(self) -> None:
        """Gives it back; no copy may be under way. Idempotent."""


M = TypeVar("M", bound=Memory)


class Part(NamedTuple, Generic[M]):
    """Bytes of a value that lie in one piece: ``size_bytes`` at ``offset`` of ``memory``."""

    memory: M
    offset: int
    size_bytes: int


class Piece(NamedTuple, Generic[M]):
    """Bytes of the tier that are pinned together: from ``first`` to before ``behind``."""

    first: int
    behind: int
    memory: M


class PinnedTier(Generic[M]):
    """Where each offset of the host tier lies. State: what is pinned, in order, which bytes are ready for a plan, and
    which pages are being pinned ahead.

    Parameters
    ----------
    pin: gives so many bytes of pinned memory; raises ``OSError`` where they are not to be had.
    most_ahead: pages that a thread may pin ahead.
    limit_bytes: the most that all pages take; None for a share of what is available (``SHARE_OF_AVAILABLE``).
    """

    def __init__(
        self,
        pin: Callable[[int], M],
        *,
        limit_bytes: int | None = None,
        page_bytes: int = PAGE_BYTES,
        most_ahead: int = 0,
    ) -> None:
        self._pin = pin
        self._most_ahead = most_ahead
        self._limit_bytes = limit_bytes
        self._page_bytes = page_bytes
        self._pieces: list[Piece[M]] = []
        self._room: Interval = (0, 0)
        self._pages_pinned = 0
        self._ahead: deque[Future[M]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def pinned_bytes(self) -> int:
        """What all of it takes."""
        return sum(piece.behind - piece.first for piece in self._pieces)

    @property
    def behind_bytes(self) -> int:
        """What those pieces take that are not wholly a plan's."""
        first, behind = self._room
        return sum(one.behind - one.first for one in self._pieces if one.first < first or one.behind > behind)

    def reserve(self, size_bytes: int, first: int = 0) -> None:
        """Pins what is missing of the ``size_bytes`` from ``first`` on, at its exact size. Raises ``OSError``."""
        for missing in list(self._missing(first, first + size_bytes)):
            self._add(missing)
        self.forget_ahead()  # a plan has few steps that need more
        self._room = (first, first + size_bytes)

    def parts(self, offset: int, size_bytes: int) -> list[Part[M]]:
        """Where the ``size_bytes`` at ``offset`` lie, in order.

        Raises ``OSError`` where pages are missing that cannot be pinned, or that the limit does not allow.
        """
        index = self._index(offset)
        if index >= 0:
            piece = self._pieces[index]
            if 0 < size_bytes <= piece.behind - offset:
                return [Part(piece.memory, offset - piece.first, size_bytes)]
        end = offset + size_bytes
        if missing := list(self._missing(offset, end)):
            self._add_pages(missing)
        return list(self._parts(offset, end))

    def _index(self, offset: int) -> int:
        """Of the last piece that does not begin behind ``offset``; -1 if there is none."""
        return bisect_right(self._pieces, offset, key=_first_of) - 1

    def _parts(self, offset: int, end: int) -> Iterator[Part[M]]:
        """Of bytes that are all pinned."""
        at, index = offset, self._index(offset)
        while at < end:
            piece = self._pieces[index]
            count = min(piece.behind, end) - at
            yield Part(piece.memory, at - piece.first, count)
            at, index = at + count, index + 1

    def _missing(self, first: int, behind: int) -> Iterator[Interval]:
        """What of these bytes is not pinned."""
        at = first
        for piece in self._pieces[max(0, self._index(first)) :]:
            if at < min(piece.first, behind):
                yield at, min(piece.first, behind)
            at = max(at, piece.behind)
        if at < behind:
            yield at, behind

    def _add_pages(self, missing: list[Interval]) -> None:
        """Pins the pages that the missing bytes lie on."""
        pages = [page for interval in missing for page in self._pages(*interval)]
        if self._limit_bytes is None:
            self._limit_bytes = int(SHARE_OF_AVAILABLE * available_bytes())
        needed_bytes = self.behind_bytes + sum(behind - first for first, behind in pages)
        if needed_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOMEM,
                f"pinned memory behind the planned is limited to {format_bytes(self._limit_bytes)}, needed "
                f"{format_bytes(needed_bytes)}; free host memory, or raise host_limit_bytes of apply()",
            )
        for page in pages:
            self._add(page)
        self._pages_pinned += len(pages)
        self._pin_ahead()

    def _pages(self, first: int, behind: int) -> Iterator[Interval]:
        """Those that missing bytes lie on: they lie one behind the other, from where the piece before ends on, and end
        where the next one begins.
        """
        index = self._index(first)
        start = self._pieces[index].behind if index >= 0 else 0
        end = self._pieces[index + 1].first if index + 1 < len(self._pieces) else None
        at = start + (first - start) // self._page_bytes * self._page_bytes
        while at < behind:
            page_end = at + self._page_bytes
            yield at, page_end if end is None else min(page_end, end)
            at = page_end

    def _add(self, interval: Interval) -> None:
        first, behind = interval
        is_page = behind - first == self._page_bytes
        memory = self._ahead.popleft().result() if is_page and self._ahead else self._pin(behind - first)
        self._pieces.insert(self._index(first) + 1, Piece(first, behind, memory))

    def _pin_ahead(self) -> None:
        """Has the thread pin pages that the limit allows."""
        assert self._limit_bytes is not None
        allowed = (self._limit_bytes - self.behind_bytes) // self._page_bytes
        wanted = min(self._pages_pinned, self._most_ahead, allowed) - len(self._ahead)
        if wanted > 0 and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="poochplan-pin")
        for _ in range(wanted):
            assert self._thread is not None
            self._ahead.append(self._thread.submit(self._pin, self._page_bytes))

    def forget_ahead(self) -> None:
        """Gives back what was pinned ahead: nothing lies there. Waits for the page that is being pinned."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        while self._ahead:
            page = self._ahead.popleft()
            if not page.cancelled() and page.exception() is None:
                page.result().free()

    def idle(self, taken: Sequence[Interval]) -> list[Piece[M]]:
        """The pieces that none of these intervals lies on."""
        return [
            piece
            for piece in self._pieces
            if not any(first < piece.behind and piece.first < behind for first, behind in taken)
        ]

    def trim(self, taken: Sequence[Interval]) -> None:
        """Gives the pieces back that none of these intervals lies on; no copy of theirs may be under way."""
        for piece in self.idle(taken):
            self._pieces.remove(piece)
            piece.memory.free()

    def free(self) -> None:
        """Gives everything back; no copy may be under way. Idempotent."""
        self.forget_ahead()
        self.trim(())
        self._room = (0, 0)


def _first_of(piece: Piece[M]) -> int:
    return piece.first
