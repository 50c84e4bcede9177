"""Workload: what the command line profiles and runs, and how its name is turned into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Workload:
    """A model and the step that trains it.

    ``step()`` runs forward and returns the scalar loss; it calls neither backward nor the optimizer.
    """

    model: torch.nn.Module
    step: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
