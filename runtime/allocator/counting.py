"""Live bytes at the allocator: what a scope of threads has taken since a begin, also within ops."""

from __future__ import annotations

from poochplan.formats.profile import ALLOCATION_UNIT_BYTES

from .scope import ThreadScope, too_many


class ByteCount:
    """Signed bytes of a scope's live blocks since :meth:`begin`, each rounded up to ``unit_bytes``.

    Births on threads of the scope count. So do deaths, on any thread, of the scope's blocks and of those that the
    beginning thread had allocated before, which make the count negative. What other threads allocate never counts, and
    no block does that was there before the allocator.
    """

    def __init__(self, scope: ThreadScope, unit_bytes: int = ALLOCATION_UNIT_BYTES) -> None:
        if unit_bytes < 1:
            raise ValueError(f"expected a unit of 1 byte or more, found {unit_bytes}")
        self.library, self._handle = scope.library, scope.handle
        self._unit_bytes = unit_bytes

    def begin(self) -> None:
        """Counts from 0. One count of a scope at a time: a second begin starts anew.

        Raises
        ------
        AllocatorError
            Sixteen scopes count or record already.
        """
        if not self.library.count_begin(self._handle, self._unit_bytes):
            raise too_many()

    def end(self) -> None:
        """Stops; what was counted can still be read."""
        self.library.count_end(self._handle)

    @property
    def live_bytes(self) -> int:
        """Live now, above what was at the begin."""
        return self.library.count_live(self._handle)

    @property
    def peak_bytes(self) -> int:
        """Most that was live at any time since the begin, or since :meth:`reset_peak`; at least 0 after a begin."""
        return self.library.count_most(self._handle)

    def reset_peak(self) -> None:
        """Both peaks begin anew at what is live."""
        self.library.count_reset_most(self._handle)

    @property
    def outside_live_bytes(self) -> int:
        """As :attr:`live_bytes`, of the blocks that lie in no arena."""
        return self.library.count_outside(self._handle)

    @property
    def outside_peak_bytes(self) -> int:
        """As :attr:`peak_bytes`, of the blocks that lie in no arena."""
        return self.library.count_outside_most(self._handle)

    def mark_peak(self) -> int:
        """Most that was live since the last mark (or the begin), in bytes; the next begins at what is live now.

        Apart from :attr:`peak_bytes`, and cheap enough to be called after each op.
        """
        return self.library.count_mark(self._handle)
