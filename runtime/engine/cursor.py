"""The cursor: where in a segment the step is. Only here is it said that one begins or ends. StepEvents: who is told of
what happens.

A *segment* is what one plan is for: from a first save to the uses of what was saved. Most steps are one segment; a step
of several micro-batches is several. A segment begins

* where a model is called, when nothing of the one before is held any more, or some of that has been used, or when that
  was none of a model's steps;
* at a save outside backward, when no segment is open, or when the open one has been used, or its forward has raised,
  and nothing of it is held any more;
* where the caller says so (``session.step()``); the model's calls begin none from then on.

It ends where the next one begins, or with the step of an optimizer of the model's once something of it has been used.
Handles that are alive then are *left over*: they stay usable, and their bytes count as there before the next segment.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from poochplan.formats.plan_set import Signature
from poochplan.runtime.run_report import StepReport

from .saved_value import Lease


class Outcome(StrEnum):
    """How a segment ended."""

    USED = "used"
    UNUSED = "unused"
    """Nothing that it saved was used."""
    RAISED = "raised"
    """Its forward ended with an exception."""
    LEFT_OVER = "left over"
    """Some of its handles were alive when the next began."""


class Segment:
    """What is known of one segment.

    ``saves``, ``packs`` and ``uses`` count its points and handles so far.
    """

    __slots__ = (
        "announced",
        "aside",
        "calls",
        "diverged",
        "earlier_uses",
        "given",
        "gradient_bytes",
        "inputs",
        "lease",
        "left_over_bytes",
        "model",
        "number",
        "ordinal",
        "outcome",
        "packs",
        "raised",
        "report",
        "saved_bytes",
        "saves",
        "saves_next",
        "used",
        "uses",
    )

    def __init__(self, number: int, ordinal: int) -> None:
        self.number = number
        """Counts from 1; 0 is none."""
        self.ordinal = ordinal
        """How many there were since the last optimizer step."""
        self.announced = False
        """Whether the caller said that it begins, and not a save or a call of a model."""
        self.model: str | None = None
        """Name of the model that it is of: the one that was announced, or called first; None before."""
        self.calls = 0
        """How often a model was called in it."""
        self.aside = False
        """Whether it is none of a model's steps: what it saves is kept, and the next call of a model begins a step."""
        self.given: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        """Storages of what its first model was called with, and their bytes."""
        self.inputs: Signature | None = None
        """Of the model's first call in it; None before."""
        self.saves_next = False
        """Whether something is about to be saved: its step policy has to be known."""
        self.gradient_bytes = 0
        """Gradients of the model's that were live as it began."""
        self.left_over_bytes = 0
        """Device bytes of what earlier segments saved and others still hold."""
        self.report = StepReport(steps=1 if number else 0)
        self.saves = 0
        self.saved_bytes = 0
        """Of the storages that it has saved."""
        self.packs = 0
        self.uses = 0
        self.earlier_uses = 0
        """First uses, in it, of what earlier segments saved."""
        self.used = False
        """Whether a handle of it has been used, also where it has diverged."""
        self.diverged = False
        """Whether it is not the planned one, or there was no plan for it."""
        self.raised = False
        self.outcome: Outcome | None = None
        """None while it is open."""
        self.lease: weakref.ref[Lease] | None = None

    @property
    def is_held(self) -> bool:
        """Whether a handle on a value that it has saved is still alive."""
        return self.lease is not None and self.lease() is not None


class Cursor:
    """State: the open segment or the last one, and the lease that the handles of all segments hold."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self.segment = Segment(0, 0)
        self.is_open = False
        self._announced = False
        self._on_idle = on_idle
        self._whole: weakref.ref[Lease] | None = None
        self._since_optimizer = 0

    # -- where segments begin and end -------------------------------------------------------------------------

    def forward_begins_one(self) -> bool:
        """The model is called: whether a segment begins here."""
        segment = self.segment
        return not self._announced and (segment.used or segment.aside or not segment.is_held)

    def save_begins_one(self) -> bool:
        """Something is saved: whether a segment begins here."""
        segment = self.segment
        return not self.is_open or ((segment.used or segment.raised) and not segment.is_held)

    def announced(self) -> None:
        """The caller says that one begins here, and will say so from now on."""
        self._announced = True

    def begin(self) -> Segment:
        """The next segment; the last one has ended."""
        self.segment = Segment(self.segment.number + 1, self._since_optimizer)
        self._since_optimizer += 1
        self.is_open = True
        return self.segment

    def end(self) -> None:
        """The open segment, if there is one, has ended."""
        if self.is_open:
            self.is_open = False
            self.segment.outcome = self._outcome()

    def _outcome(self) -> Outcome:
        if self.segment.raised:
            return Outcome.RAISED
        if self.segment.is_held:
            return Outcome.LEFT_OVER
        return Outcome.USED if self.segment.used else Outcome.UNUSED

    def optimizer_stepped(self) -> bool:
        """An optimizer of the model's has stepped: whether the open segment ends with that."""
        self._since_optimizer = 0
        return self.is_open and self.segment.used

    # -- handles ----------------------------------------------------------------------------------------------

    @property
    def holds_values(self) -> bool:
        """Whether a handle on a saved value is still alive, of whatever segment."""
        return self._whole is not None and self._whole() is not None

    def lease(self) -> Lease:
        """What each handle of the segment holds."""
        segment = self.segment
        lease = segment.lease() if segment.lease is not None else None
        if lease is None:
            lease = Lease(self._lease_of_all())
            segment.lease = weakref.ref(lease)
        return lease

    def _lease_of_all(self) -> Lease:
        """``on_idle`` is called when nobody holds it any more."""
        whole = self._whole() if self._whole is not None else None
        if whole is None:
            whole = Lease()
            self._whole = weakref.ref(whole)
            weakref.finalize(whole, self._on_idle).atexit = False  # a callback here would go with the engine
        return whole


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
