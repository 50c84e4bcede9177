"""AllocatorBuild: builds the compiled allocator in the background if it is missing."""

from __future__ import annotations

import contextlib
import threading

import torch

from poochplan.errors import AllocatorError, NativeError, UsageError
from poochplan.runtime.arena.library import build, is_built, is_loaded, library
from poochplan.runtime.arena.serving import ArenaMode, why_no_arena
from poochplan.runtime.watch.teller import Teller

from .telling import BUILDING


class AllocatorBuild:
    """State: whether the allocator is active. The first segments are profiled after the build: a profile begun without
    the allocator would never have the memory inside ops.

    Raises ``UsageError`` if the mode is ``"on"`` and an arena is impossible.
    """

    def __init__(self, mode: ArenaMode, where: torch.device, teller: Teller) -> None:
        self._thread: threading.Thread | None = None
        reason = why_no_arena(where.type)
        self._is_loaded = bool(reason)
        if not reason and mode == "on":  # an arena is required, so wait for the build or its error
            try:
                library()
            except AllocatorError as error:
                reason = str(error)
        if reason and mode == "on":
            raise UsageError(f'arena: expected "on" to be possible, found {reason}')
        if not (reason or is_loaded() or is_built()):
            teller.say(BUILDING)
            self._thread = threading.Thread(target=self._build, name="allocator's build")
            with contextlib.suppress(RuntimeError):  # with limited address space its first user builds it
                self._thread.start()

    @staticmethod
    def _build() -> None:
        with contextlib.suppress(NativeError):  # loading it reports why
            build()

    def wait(self, wait_s: float | None) -> None:
        """Waits until it is built, or until the timeout."""
        if self._thread is not None:
            self._thread.join(wait_s)

    @property
    def is_ready(self) -> bool:
        """Whether it is active, or will never be."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if not self._is_loaded:
            self._is_loaded = True
            with contextlib.suppress(AllocatorError):
                library()
        return True
