"""KeepAll: nothing is moved or replayed. The step is the in-core one, but for what the hooks themselves take."""

from __future__ import annotations

import torch

from poochplan.formats.plan import Decision, Instructions
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.closure import NotReplayable
from poochplan.runtime.replays.recorded import StorageRecord

from .driver import NOTHING, Actions, Diverged, Driver


class KeepAll:
    """Stateless. A base for drivers that watch a step: each answer is the one that changes nothing."""

    instructions: Instructions | None = None

    def begin(self, segment: Segment) -> Actions:
        return NOTHING

    def saved(self, index: int | None, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        return Decision.KEEP

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        """Any will do."""

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        return NOTHING

    def at_use(self, number: int, handle: Handle, saves: int) -> Actions:
        return NOTHING

    def before_drop(self, value: SavedValue) -> None:
        """Nothing to do."""

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return NOTHING

    def copy_failed(self, value: SavedValue, error: OSError) -> None:
        """It is kept."""

    def diverged(self, reason: Diverged) -> tuple[Driver, Actions]:
        return self, NOTHING

    def end(self, segment: Segment, outcome: Outcome) -> None:
        """Nothing to do."""
