"""Cursor: where in a segment the step is. It alone decides where a segment begins and ends. StepEvents: the functions
that are called at these places.

A *segment* (micro-step) is the part of a step that one plan covers: from a first save to the uses of the saved values.
Most steps are one segment; a step of several micro-batches has several. A segment begins

* when a model is called, if no value of the previous segment is held any more, or one of them has been used, or its
  forward has raised (the error may hold values), or the previous segment belonged to no step;
* at a save outside backward, if no segment is open, or if the open one has been used or its forward has raised, and
  none of its values is held any more;
* where the caller announces it (``session.step()``); from then on calls of the model begin no segment.

It ends when the next one begins. If one of its values has been used, it also ends with a step of the model's optimizer
outside backward.
Handles that are alive then are *left over*: they stay usable, and their bytes count as from before the next segment.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from poochplan.formats.plan_set import Signature
from poochplan.runtime.run_report import StepReport

from .saved_value import Lease, SavedValue


class Outcome(StrEnum):
    USED = "used"
    UNUSED = "unused"
    """None of its saved values was used."""
    RAISED = "raised"
    """Its forward ended with an exception."""
    LEFT_OVER = "left over"
    """Some of its handles were alive when the next segment began."""


@dataclass(eq=False, slots=True)
class Segment:
    """The state of one segment.

    ``saves``, ``packs`` and ``uses`` count its points and handles so far.
    """

    number: int
    """Counts from 1; 0 means that there is no segment yet."""
    ordinal: int
    """Number of segments since the last optimizer step."""
    announced: bool = False
    """Whether the caller announced it. Otherwise a save or a call of a model began it."""
    model: str | None = None
    """Name of the model that it belongs to: the one that was announced or called first. None before that."""
    calls: int = 0
    """Number of calls of a model in it."""
    aside: bool = False
    """Whether it belongs to no step: its saved values are kept, and the next call of a model begins a step."""
    given: list[tuple[weakref.ref[torch.UntypedStorage], int]] = field(default_factory=list)
    """Storages of the inputs of its first model, and their bytes."""
    inputs: Signature | None = None
    """Inputs of the model's first call in it; None before."""
    saves_next: bool = False
    """Whether the next event is a save, so that its step policy must be known."""
    gradient_bytes: int = 0
    """Bytes of the model's gradients that were live when it began."""
    left_over: list[weakref.ref[SavedValue]] = field(default_factory=list)
    """Values that the segment before saved and that are still held."""
    left_over_bytes: int = 0
    """Their bytes on the device."""
    report: StepReport = field(default_factory=StepReport)
    saves: int = 0
    saved_values: int = 0
    """The same without points of values that it has left out, and of sources."""
    left_out: int = 0
    """Number of planned values that it lacks, because it has left out the layers that save them."""
    saved_bytes: int = 0
    """Bytes of the storages that it has saved."""
    packs: int = 0
    others: int = 0
    """Number of saved tensors that no plan moves: sparse and nested ones, and those of a subclass."""
    uses: int = 0
    earlier_uses: int = 0
    """Number of first uses, in it, of values that earlier segments saved."""
    late_uses: list[int] = field(default_factory=list)
    """Its handles that were first used after its end, by ordinal."""
    used: bool = False
    """Whether one of its handles has been used, even if it has diverged."""
    diverged: bool = False
    """Whether it differs from its plan, or has no plan."""
    raised: bool = False
    outcome: Outcome | None = None
    """None while it is open."""
    lease: weakref.ref[Lease] | None = None

    def left_over_storages(self) -> list[torch.UntypedStorage]:
        """Those of the values that are left over, as far as they are on the device."""
        values = (reference() for reference in self.left_over)
        return [value.storage for value in values if value is not None and value.storage is not None]

    @property
    def is_held(self) -> bool:
        """Whether a handle on a value that it has saved is still alive."""
        return self.lease is not None and self.lease() is not None


class Cursor:
    """State: the open segment or the last one, and the lease that the handles of all segments hold."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self.segment = Segment(0, 0)
        self.is_open = False
        self.is_announced = False
        """Whether the caller announces all segments from here on."""
        self._on_idle = on_idle
        self._whole: weakref.ref[Lease] | None = None
        self._since_optimizer = 0

    # -- where segments begin and end -------------------------------------------------------------------------

    def forward_begins_one(self) -> bool:
        """Whether a segment begins when the model is called now."""
        segment = self.segment
        is_over = segment.used or segment.raised or segment.aside or not segment.is_held
        return not self.is_announced and is_over

    def save_begins_one(self) -> bool:
        """Whether a segment begins with a tensor that is saved now."""
        segment = self.segment
        return not self.is_open or ((segment.used or segment.raised) and not segment.is_held)

    def begin(self) -> Segment:
        self.segment = Segment(self.segment.number + 1, self._since_optimizer, report=StepReport(steps=1))
        self._since_optimizer += 1
        self.is_open = True
        return self.segment

    def end(self) -> None:
        """Ends the open segment, if there is one."""
        if self.is_open:
            self.is_open, segment = False, self.segment
            ended = Outcome.USED if segment.used else Outcome.UNUSED
            ended = Outcome.LEFT_OVER if segment.is_held else ended
            segment.outcome = Outcome.RAISED if segment.raised else ended

    def optimizer_stepped(self) -> bool:
        """An optimizer of the model has stepped. Returns whether this ends the open segment."""
        self._since_optimizer = 0
        return self.is_open and self.segment.used

    # -- handles ----------------------------------------------------------------------------------------------

    @property
    def holds_values(self) -> bool:
        """Whether a handle of a saved value of any segment is still alive."""
        return self._whole is not None and self._whole() is not None

    def lease(self) -> Lease:
        """The object that each handle of the segment holds. ``on_idle`` is called when no lease is held any more."""
        segment = self.segment
        lease = segment.lease() if segment.lease is not None else None
        if lease is None:
            whole = self._whole() if self._whole is not None else None
            if whole is None:
                whole = Lease()
                self._whole = weakref.ref(whole)
                weakref.finalize(whole, self._on_idle).atexit = False  # a callback here would go with the engine
            lease = Lease(whole, segment.late_uses)
            segment.lease = weakref.ref(lease)
        return lease


def nothing(*_: Any) -> None:
    """The default of each event: does nothing."""


@dataclass(frozen=True)
class StepEvents:
    """Functions that are called on the thread of the step. By default each does nothing."""

    chosen: Callable[[Segment], None] = nothing
    """A segment has its step policy, which has done nothing yet."""
    point: Callable[[int], None] = nothing
    """Called at each save and use point before any action there, with the number of points passed."""
    backward: Callable[[bool], None] = nothing
    """Autograd is about to compute a backward (true), or has ended (false)."""
    over: Callable[[Segment], None] = nothing
    """A segment's step is over, before other code runs: its optimizer has stepped, a model is called without gradients,
    the code that follows is in-core, or the next segment begins."""
    ended: Callable[[Segment], None] = nothing
    """A segment has ended and all its facts are known; the next one begins."""
    departed: Callable[[], None] = nothing
    """A segment has diverged from its plan, or its forward has raised."""
    resting: Callable[[], None] = nothing
    """The code that runs next follows no plan: a model is called without gradients, or steps run in-core."""
    rests: Callable[[Any], None] = nothing
    """The session rests from here on, until a step takes more than this (``metering/watch.py``)."""
    outgrown: Callable[[], None] = nothing
    """While the session rests, a step has taken too much."""
    optimizing: Callable[[torch.optim.Optimizer], None] = nothing
    """An optimizer of the models is about to step."""
    releases: Callable[[torch.UntypedStorage], int | None] = nothing
    """A value's storage is about to be released. Returns a number by which it may be found again, or nothing."""
    finds: Callable[[int, int], torch.UntypedStorage | None] = nothing
    """The storage of that number and so many bytes, as it was when released; None if other blocks have come there."""
    elsewhere: Callable[[str], None] = nothing
    """The model of that name is called with gradients on another thread than the session's."""


NO_EVENTS = StepEvents()
"""All events do nothing."""


def weakly(session: Any, method: Callable[..., Any]) -> Callable[..., None]:
    """A session's method for callers that must not keep the session alive. Without the session it does nothing."""
    reference = weakref.ref(session)

    @functools.wraps(method)
    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *args)

    return call
