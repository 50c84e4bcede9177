"""LaidArena: one arena for steps of several kinds, which are laid out in it in turn."""

from __future__ import annotations

import numpy as np

from poochplan.errors import AllocatorError
from poochplan.runtime.allocator.arena import Arena, Places
from poochplan.tensors.host_memory import give_back_freed

from .recorded_layout import RecordedLayout

_NOWHERE = Places(*(np.empty(0, np.int64) for _ in range(3)))


class LaidArena:
    """State: the arena, once there was something to lay out, and whose places it has now.

    Its address space is as large as the largest layout that it has had; the machine's memory is what steps have touched
    of it, and no more than the budget of the plan that is followed has room for.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        """None as well where there is no address space for it."""
        self._layout: RecordedLayout | None = None
        self._held_bytes = 0
        self._rests = False
        """Whether the machine has its memory back since the last step."""

    @property
    def held_bytes(self) -> int:
        """Of the machine's memory, at most, while steps of the present layout are served; 0 where none is."""
        return self._held_bytes if self._layout is not None else 0

    def lay(self, layout: RecordedLayout | None, largest_bytes: int, room_bytes: int) -> bool:
        """Has the places of ``layout`` for the steps that begin from here on; None is none, and its memory goes.

        Parameters
        ----------
        largest_bytes: of the arenas of all layouts that will come again.
        room_bytes: most that the arena may take in a step of this one.

        Returns whether a step can be served now.
        """
        self._rests = False
        if layout is self._layout:
            return layout is not None
        self._layout = None
        if layout is None:
            if self.arena is not None:
                self.arena.lay_out(_NOWHERE, kept_bytes=0)
            self._held_bytes = 0
            return False
        if self.arena is not None and self.arena.size_bytes < layout.arena_bytes:
            self.leave()
        kept_bytes = max(layout.arena_bytes, min(largest_bytes, room_bytes))
        try:
            if self.arena is None:
                self.arena = Arena(layout.places, max(largest_bytes, layout.arena_bytes), layout.least_bytes)
                give_back_freed()  # what the steps before have left is not used again
            else:
                self.arena.lay_out(layout.places, layout.least_bytes, min(kept_bytes, self.arena.size_bytes))
        except AllocatorError:  # no address space: the ordinary allocator asks for less at a time
            return False
        self._layout = layout
        self._held_bytes = max(layout.arena_bytes, min(self._held_bytes, kept_bytes))
        return True

    def begin(self, point: int) -> bool:
        """A run begins that is served by its places, with the clock at ``point``; False where the arena was closed."""
        assert self.arena is not None
        try:
            self.arena.begin(point)
        except RuntimeError:  # by another thread, meanwhile
            return False
        return True

    def rests(self) -> None:
        """The machine has its memory back until the next step, but for what lives there; the layout stays."""
        if self.arena is not None and self._layout is not None and not self._rests:
            self.arena.lay_out(self._layout.places, self._layout.least_bytes, kept_bytes=0)
            self._rests = True

    def leave(self) -> None:
        """What lies in the arena stays in it, and another one is made for the steps that begin from here on."""
        self.close()
        self.arena = self._layout = None
        self._held_bytes = 0

    def close(self) -> None:
        """Nothing is served any more; its memory goes with the last tensor in it. Its counts can still be read."""
        self._rests = True  # there is nothing to give back any more
        if self.arena is not None:
            self.arena.close()
