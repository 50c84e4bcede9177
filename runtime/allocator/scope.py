"""Scopes of threads: whose blocks are counted and recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from poochplan.errors import AllocatorError

from .library import Library, library


class ThreadScope:
    """A set of threads. A block belongs to the scope of the thread that gave birth to it; any thread may let it die.

    A thread is in one scope at a time, or in none. State: in the library, and for good; so a program needs few.

    Raises what :func:`library` raises.
    """

    def __init__(self) -> None:
        self.library: Library = library()
        handle = self.library.scope_new()
        if handle is None:
            raise AllocatorError("expected a few bytes for a scope of threads, found no memory; free some")
        self.handle: int = handle

    def join(self) -> None:
        """From here on what this thread allocates belongs to the scope."""
        self.library.scope_join(self.handle)

    def leave(self) -> None:
        """From here on what this thread allocates belongs to no scope."""
        self.library.scope_join(None)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """A block in which this thread belongs to the scope; behind it, to the one it was in before."""
        before = self.library.scope_join(self.handle)
        try:
            yield
        finally:
            self.library.scope_join(before)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block in which what this thread allocates belongs to no scope, and lies in no arena: work that is not the
        step's.
        """
        before = self.library.scope_join(None)
        self.library.set_aside(1)
        try:
            yield
        finally:
            self.library.set_aside(-1)
            self.library.scope_join(before)


def too_many() -> AllocatorError:
    """What a scope meets that is one too many to count or record."""
    return AllocatorError("expected at most 16 scopes that count or record at once, found more; end one of them")
