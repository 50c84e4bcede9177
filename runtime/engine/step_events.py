"""StepEvents: who is told of what happens in a step, as it happens."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cursor import Segment


def nothing(*_: Any) -> None:
    """Of what nobody wants to be told."""


@dataclass(frozen=True)
class StepEvents:
    """Each is called on the thread of the step, and does nothing by default."""

    chosen: Callable[[Segment], None] = nothing
    """A segment has its step policy, which has done nothing yet."""
    point: Callable[[int], None] | None = None
    """At each save and use point, before anything is done there: how many of the segment have been passed. None costs
    least."""
    backward: Callable[[bool], None] = nothing
    """Autograd is about to compute a backward (true), or has ended (false)."""
    over: Callable[[Segment], None] = nothing
    """A segment's step is over, before other things run: its optimizer has stepped, a model is called without
    gradients, what follows is in-core, or the next begins."""
    ended: Callable[[Segment], None] = nothing
    """All is known of a segment, as the next begins."""
    departed: Callable[[], None] = nothing
    """A segment has left its plan, or its forward has raised."""
    resting: Callable[[], None] = nothing
    """What runs next is no step that follows a plan: a model is called without gradients, or steps run in-core."""
    optimizing: Callable[[torch.optim.Optimizer], None] = nothing
    """An optimizer of the models' is about to step."""
    stepped: Callable[[torch.optim.Optimizer], None] = nothing
    """It has, and the segment that was used has ended with that."""


NO_EVENTS = StepEvents()
"""Nobody is told."""


def weakly(session: Any, method: Callable[..., Any]) -> Callable[..., None]:
    """The method of a session, for those whom the session is not to be held by; nothing where it is gone."""
    reference = weakref.ref(session)

    @functools.wraps(method)
    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *args)

    return call
