"""RepeatedStep: a step that is run again and again as it is, from an arena in which it was laid out as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.runtime.metering.allocated import step_scope

from .known_steps import misses
from .served_runs import Pack, RecordedLayout, ServedRuns, recorded_blocks, recorded_layout

MOST_LAID_OUT = 3
"""So often it is laid out, where its runs differ."""
MOST_BLOCKS = 20_000
"""A step with more is not served."""


class RepeatedStep:
    """State: the layout, once a run was written down. Without a compiled allocator all runs are ordinary.

    The first run is ordinary and written down, and those behind it are served. What one has missed is laid out anew.
    """

    def __init__(self, pack: Pack) -> None:
        scope = step_scope()
        self._pack, self._runs = pack, ServedRuns(scope)
        self._layout: RecordedLayout | None = None
        self._times = 0 if scope is not None else MOST_LAID_OUT

    @property
    def is_served(self) -> bool:
        """Whether the last run was served, all of it."""
        fates = self._runs.fates
        return fates is not None and not misses(fates)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A block that is one run. What the one before has left behind is gone by its begin."""
        self._learn()
        arena_bytes = self._layout.arena_bytes if self._layout is not None else 0
        is_logged = self._times < MOST_LAID_OUT
        self._runs.begin(self._layout, largest_bytes=arena_bytes, room_bytes=arena_bytes, log=is_logged)
        try:
            yield
        finally:
            self._runs.end()

    def rests(self) -> None:
        """The machine has the arena's memory back until the next run."""
        self._runs.laid.rests()

    def close(self) -> None:
        """Runs are ordinary again; what lies in the arena stays as it is. Idempotent."""
        self._times, self._layout = MOST_LAID_OUT, None
        self._runs.close()

    def _learn(self) -> None:
        """From the run before, if it was written down."""
        fates, events = self._runs.fates, self._runs.events()
        if events is None:
            return
        if fates is not None and not misses(fates):
            self._times = MOST_LAID_OUT  # as it is
            return
        self._times += 1
        if fates is not None and fates.taken.blocks:
            self._runs.laid.leave()  # what lies in places of its own there may be there to stay
        blocks = recorded_blocks(events, LEAST_PLACED_BYTES)
        if len(blocks) <= MOST_BLOCKS:
            self._layout = recorded_layout(blocks, LEAST_PLACED_BYTES, self._pack)
