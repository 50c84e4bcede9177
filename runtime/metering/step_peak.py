"""StepPeak: what tells how much a step takes at most, one for each kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch


class Told(NamedTuple):
    """The most bytes of a step so far."""

    peak_bytes: int
    blocks_bytes: int
    """The same with an arena's blocks in place of the arena."""
    mark: int | None = None
    """Behind which it was, where that is known."""


class StepPeak(Protocol):
    """Of one step after another."""

    arena_bytes: int
    """Of the arena that serves the step, which counts whole; to be kept true by whoever knows."""

    @property
    def needs_census(self) -> bool:
        """Whether somebody has to say what was there before."""

    def step_begins(self) -> None:
        """On the thread of the step."""

    def looked_around(self, storages: Mapping[int, torch.UntypedStorage], unseen_bytes: int = 0) -> None:
        """These, and no others, are there now; so are ``unseen_bytes`` that no tensor shows."""

    def mark(self, number: int) -> None:
        """The step has come to that point."""

    def now(self) -> Told | None:
        """By now; None where it is not known."""

    def ends(self) -> Told | None:
        """Of the whole step, where that is known only now. Idempotent."""
