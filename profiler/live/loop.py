"""Loop: what is known of a running loop."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from poochplan.runtime.metering.census import foreseen_bytes

from .step_kinds import StepKinds


class Loop:
    """An observer fills it, and a source of plans reads it. State: the kinds of its segments; its optimizers with their
    places, how often they have stepped, and the place of the last one.

    Parameters
    ----------
    model: all of the models together.
    optimizers: the known ones; others are found when they step.
    where: the models' device.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], where: torch.device
    ) -> None:
        self.model, self.where = model, where
        self.kinds = StepKinds()
        self.optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int](zip(optimizers, itertools.count()))
        """A new optimizer gets the place of one that is gone."""
        self.steps = self.after = 0

    def meets(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is one of the loop's."""
        if optimizer not in self.optimizers:
            taken = set(self.optimizers.values())
            self.optimizers[optimizer] = next(place for place in itertools.count() if place not in taken)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.meets(optimizer)  # one that was new while the session rested
        self.steps += 1
        self.after = self.optimizers[optimizer]

    @property
    def is_studied(self) -> bool:
        """Whether some kind of its segments is being studied."""
        return any(kind.is_studied for kind in self.kinds.values())

    @property
    def foreseen_bytes(self) -> int:
        """Bytes that its optimizers will add one day."""
        return foreseen_bytes(self.optimizers, self.where.type)
