"""Bytes that the CPU's allocator hands out: all that a step takes, including memory inside its ops.

This needs the compiled allocator, which counts by thread. A thread that has joined stays in the count: memory that it
allocates between steps and frees within one must count in both.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from poochplan.errors import AllocatorError
from poochplan.formats.profile_parts import counted_bytes
from poochplan.runtime.arena.library import ThreadScope, untold_absence
from poochplan.runtime.messages import warn


@functools.cache
def step_scope() -> ThreadScope | None:
    """The scope of all threads that run steps; None without a compiled allocator, and the user is told."""
    try:
        return ThreadScope()
    except AllocatorError:
        if line := untold_absence():
            warn(line)
        return None


@functools.cache
def _counted() -> ThreadScope | None:
    scope = step_scope()
    if scope is not None:
        scope.begin_count()
    return scope


def joined_count() -> ThreadScope | None:
    """The scope of steps, whose count never ends. From here on it includes the calling thread's allocations."""
    scope = _counted()
    if scope is not None:
        scope.join()
    return scope


def aside() -> contextlib.AbstractContextManager[None]:
    """A block in which allocations of this thread do not count, for the runtime's own notes."""
    scope = step_scope() if step_scope.cache_info().currsize else None  # nothing counts before the scope exists
    return scope.set_aside() if scope is not None else contextlib.nullcontext()


class PeakBytes(NamedTuple):
    """The most bytes of a step so far."""

    peak_bytes: int
    blocks_bytes: int
    """The same with an arena's blocks in place of the arena."""
    mark: int | None = None
    """The mark that the peak followed, if it is known."""


NOTHING = PeakBytes(0, 0)


class StepPeak:
    """The peak of one step after another. This class itself knows none."""

    needs_census = True
    """Whether a census of the memory before the step is needed."""

    def step_begins(self) -> None:
        """A step begins, on this thread."""

    def looked_around(self, storages: Mapping[int, torch.UntypedStorage], unseen_bytes: int = 0) -> None:
        """A census found exactly these storages, and ``unseen_bytes`` that no tensor shows."""

    def uses_arena(self, size_bytes: int) -> None:
        """The step uses an arena of that size from here on, which counts as a whole; 0 for none."""

    def mark(self, number: int) -> None:
        """The step has reached that point."""

    def now(self) -> PeakBytes | None:
        """The peak so far; None if it is not known."""
        return None

    def ends(self) -> PeakBytes | None:
        """The peak of the whole step, if it is known only now. Idempotent."""
        return None


class AllocatedPeak(StepPeak):
    """Most bytes allocated in a step: the memory that existed when it began, from a census, plus the allocator's count.
    An arena counts as a whole, with its holes, and its blocks do not count separately.

    Steps without a census continue from the last one. The allocator does not see the death of memory from before it was
    loaded, so such storages of a census are watched.
    """

    def __init__(self) -> None:
        count = joined_count()
        assert count is not None, "step_peak_of has asked for it"
        self._count = count
        self._beside_bytes: int | None = None
        """To be added to the count: everything that was live at the last census."""
        self._beside_arena_bytes = 0
        """The same for memory that lies in no arena."""
        self._arena_bytes = 0
        self._most = NOTHING
        """The peak of the step before the arena, or the memory beside the count, last changed."""
        self._unknown: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def step_begins(self) -> None:
        self._count.join()
        self._count.reset_peak()
        self._most = NOTHING

    def looked_around(self, storages: Mapping[int, torch.UntypedStorage], unseen_bytes: int = 0) -> None:
        library = self._count.library
        there_bytes = sum(counted_bytes(one.nbytes()) for one in storages.values())
        self._beside_bytes = unseen_bytes + there_bytes - self._count.live_bytes
        outside = (one.nbytes() for one in storages.values() if not library.is_served(one.data_ptr()))
        self._beside_arena_bytes = unseen_bytes + sum(map(counted_bytes, outside)) - self._count.outside_live_bytes
        self._unknown.clear()
        for key, storage in storages.items():
            if library.block_at(storage.data_ptr()) < 0:
                died = functools.partial(self._died, key, counted_bytes(storage.nbytes()))
                self._unknown[key] = weakref.ref(storage, died)

    def now(self) -> PeakBytes | None:
        """The peak so far; None before the first census."""
        if self._beside_bytes is None:
            return None
        blocks_bytes = max(self._most.blocks_bytes, self._beside_bytes + self._count.peak_bytes)
        peak_bytes = max(self._most.peak_bytes, blocks_bytes)
        if self._arena_bytes:
            outside_bytes = self._beside_arena_bytes + self._count.outside_peak_bytes
            peak_bytes = max(peak_bytes, self._arena_bytes + outside_bytes)
        return PeakBytes(peak_bytes, blocks_bytes)

    def uses_arena(self, size_bytes: int) -> None:
        if size_bytes != self._arena_bytes:
            self._begin_anew()
            self._arena_bytes = size_bytes

    def _begin_anew(self) -> None:
        """Keeps the peak so far: from now on the count is added to other bytes."""
        found = self.now()
        if found is not None:
            self._most = found
            self._count.reset_peak()

    def _died(self, key: int, size_bytes: int, _: object) -> None:
        if self._unknown.pop(key, None) is not None and self._beside_bytes is not None:
            self._begin_anew()
            self._beside_bytes -= size_bytes
            self._beside_arena_bytes -= size_bytes
