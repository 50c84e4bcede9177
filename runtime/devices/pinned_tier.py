"""The host tier of the CUDA device: one pinned slab for what is planned, and pinned pages behind it for the rest.

Pages are all of one size and lie one behind the other, so whatever is placed behind the slab finds those that earlier
values have left. A value may lie on several: it is copied in parts.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes

PAGE_BYTES = 64 << 20
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


class PinnedTier(Generic[M]):
    """Where each offset of the host tier lies. Pages are pinned when a value first needs them.

    Parameters
    ----------
    pin: gives so many bytes of pinned memory; raises ``OSError`` where they are not to be had.
    limit_bytes: the most that all pages take; None for a share of what is available (``SHARE_OF_AVAILABLE``).
    """

    def __init__(
        self, pin: Callable[[int], M], *, limit_bytes: int | None = None, page_bytes: int = PAGE_BYTES
    ) -> None:
        self._pin = pin
        self._limit_bytes = limit_bytes
        self._page_bytes = page_bytes
        self._slab: M | None = None
        self._pages: dict[int, M] = {}

    @property
    def slab_bytes(self) -> int:
        return self._slab.size_bytes if self._slab is not None else 0

    @property
    def behind_bytes(self) -> int:
        """What the pages take."""
        return len(self._pages) * self._page_bytes

    def reserve(self, size_bytes: int) -> None:
        """Pins the slab at its exact size, once and before anything else. Raises ``OSError``; there is no slab then."""
        assert self._slab is None, "the slab is pinned once"
        assert not self._pages, "pages lie behind the slab"
        if size_bytes > 0:
            self._slab = self._pin(size_bytes)

    def parts(self, offset: int, size_bytes: int) -> list[Part[M]]:
        """Where the ``size_bytes`` at ``offset`` lie, in order.

        Raises ``OSError`` where pages are missing that cannot be pinned, or that the limit does not allow.
        """
        if self._slab is not None and 0 < size_bytes <= self._slab.size_bytes - offset:  # as planned
            return [Part(self._slab, offset, size_bytes)]
        pieces = list(self._pieces(offset, size_bytes))
        missing = [page for page, _, _ in pieces if page >= 0 and page not in self._pages]
        if missing:
            self._add(missing)
        return [Part(self._memory(page), start, count) for page, start, count in pieces]

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(page, or -1 for the slab; first byte in it; bytes), in order."""
        at, end = offset, offset + size_bytes
        while at < end:
            if at < self.slab_bytes:
                page, start, room = -1, at, self.slab_bytes - at
            else:
                page, start = divmod(at - self.slab_bytes, self._page_bytes)
                room = self._page_bytes - start
            count = min(room, end - at)
            yield page, start, count
            at += count

    def _memory(self, page: int) -> M:
        if page >= 0:
            return self._pages[page]
        assert self._slab is not None
        return self._slab

    def _add(self, missing: list[int]) -> None:
        if self._limit_bytes is None:
            self._limit_bytes = int(SHARE_OF_AVAILABLE * available_bytes())
        needed_bytes = self.behind_bytes + len(missing) * self._page_bytes
        if needed_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOMEM,
                f"pinned memory behind the planned is limited to {format_bytes(self._limit_bytes)}, needed "
                f"{format_bytes(needed_bytes)}; free host memory, or raise host_limit_bytes of apply()",
            )
        for page in missing:
            self._pages[page] = self._pin(self._page_bytes)

    def trim(self, size_bytes: int) -> None:
        """Gives the pages back that lie wholly beyond the first ``size_bytes``; no copy of theirs may be under way."""
        for page in [page for page in self._pages if self.slab_bytes + page * self._page_bytes >= size_bytes]:
            self._pages.pop(page).free()

    def free(self) -> None:
        """Gives everything back; no copy may be under way. Idempotent."""
        self.trim(0)
        if self._slab is not None:
            self._slab.free()
        self._slab = None
