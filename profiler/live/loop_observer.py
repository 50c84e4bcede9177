"""LoopObserver: studies the segments of a running loop, kind by kind, until each kind has a profile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from poochplan.formats.plan import Decision
from poochplan.profiler.capture.clock import clock_of
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.mechanism import rebuild_together
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.metering.census import census_bytes
from poochplan.runtime.plan_source import Attached, PlanSource, StepObserver
from poochplan.runtime.step_policies.step_policy import KeepAll, KeepWhileRoom, StepPolicy, SwapEach
from poochplan.tensors.signatures import model_switches
from poochplan.torch_private.hooks import Hooks
from poochplan.torch_private.tensor_internals import is_scripted

from .segment_observer import SegmentObserver, StudyContext
from .step_kinds import Key, Loop, StepKind
from .study import StudyOptions

MOST_WARMUP = 8
"""After this many segments without a step of an optimizer, studies begin anyway."""


class LoopPlans(Protocol):
    """What the observer of a loop asks about plans, and tells."""

    def known(self, own: Key, segment: Segment) -> StepPolicy | None:
        """The policy of a segment with that key, before its kind is known, if it needs no study."""

    def policy(self, kind: StepKind | None) -> StepPolicy:
        """The step policy for a segment that is not studied, or not any more. None: nothing is known about its kind, or
        larger inputs are still being studied.
        """

    def profiled(self, kind: StepKind) -> None:
        """The study of a kind is over: it has a profile, or was refused."""

    def is_planning(self, kind: StepKind) -> bool:
        """Whether a plan of that kind is being made."""


class NoPlans(PlanSource):
    """For a loop whose profile alone is wanted: after the study, segments run as they did in it."""

    def known(self, own: Key, segment: Segment) -> StepPolicy | None:
        return None

    def policy(self, kind: StepKind | None) -> StepPolicy:
        fits = kind is not None and kind.profile is not None and kind.profile.mode == "run"
        return KeepAll() if fits else SwapEach(at_once=True)

    def profiled(self, kind: StepKind) -> None:
        pass

    def is_planning(self, kind: StepKind) -> bool:
        return False


class LoopObserver(StepObserver):
    """State: the observer of the open segment, if that is studied.

    Parameters
    ----------
    loop: what is known of it, which this class fills.
    options: of each kind's study.
    plans: for segments that need no study.
    """

    def __init__(
        self, loop: Loop, options: StudyOptions, plans: LoopPlans, spill_dir: str | Path | None = None
    ) -> None:
        self._loop, self._plans, self._study_options = loop, plans, options
        self._observer: SegmentObserver | None = None
        self._kind: StepKind | None = None
        self._key: Key | None = None
        """The key of the open segment, before its kind is known."""
        self._compared: tuple[Key, int] | None = None
        self._segments = 0
        self.context = StudyContext(loop.model, loop.where, clock_of(loop.where), spill_dir, loop.optimizers)

    # -- the chooser ------------------------------------------------------------------------------------------

    def choose(self, segment: Segment) -> StepPolicy | None:
        """The observer's policy if the segment is studied, else what the plans say."""
        policy = self._chosen(segment)
        self._attachment.engine.planned.is_off = self._observer is not None  # which looks at each save and use
        swaps_once = self._observer is not None and self._observer.swaps_once
        if policy is not None and not swaps_once and _gives_up(policy):
            self._attachment.memory_is_short()
        return policy

    def _chosen(self, segment: Segment) -> StepPolicy | None:
        if segment.inputs is None and not segment.saves_next:
            return None
        loop, has_gradients = self._loop, bool(segment.gradient_bytes)
        is_updated = loop.steps or self._segments < MOST_WARMUP
        place = segment.ordinal if is_updated else 0  # where no known optimizer steps, there are no places
        own = Key(loop.after, place, segment.inputs or (), has_gradients, model_switches(loop.model))
        self._key = own
        known = self._plans.known(own, segment)
        if known is not None:
            return known
        key = loop.kinds.key_of(own)
        if not loop.steps and self._segments < MOST_WARMUP:
            return self._plans.policy(None)
        if loop.kinds.may_be_known(key):
            gc.collect()  # as before a capture
            self._compared = key, census_bytes(loop.where.type) + loop.foreseen_bytes
            return self._plans.policy(None)
        kind = self._kind_of(key)
        if kind is None or kind.next_observer is None:
            return self._plans.policy(kind)
        self._observer = kind.new_observer()
        if self._observer is None:
            self._plans.profiled(kind)
            return self._plans.policy(kind)
        self._kind, engine = kind, self._attachment.engine
        engine.fallbacks.silent, engine.mechanism.rebuild = True, self._observer.rebuild
        return self._observer.policy

    def begins(self, segment: Segment) -> None:
        if self._observer is not None:
            self._observer.begin(segment)

    def _kind_of(self, key: Key) -> StepKind | None:
        """The study of that kind, which begins here if necessary. None while that of larger inputs is running."""
        kinds = self._loop.kinds
        beside = [kind for other, kind in kinds.items() if other != key and other.is_beside(key)]
        for kind in beside:
            if kind.waits():
                self._plans.profiled(kind)
        if key not in kinds:
            larger = [kind for kind in beside if kind.key.is_larger(key)]
            if any(kind.is_studied or self._plans.is_planning(kind) for kind in larger):
                return None
            for kind in beside:
                if kind.is_studied and key.is_larger(kind.key):
                    del kinds[kind.key]
            kind = kinds.begin(key, self.context, self._study_options)
            if not kind.is_studied:
                self._plans.profiled(kind)
        return kinds[key]

    # -- what segments do -------------------------------------------------------------------------------------

    def attached(self, attachment: Attached) -> Hooks:
        self._attachment = attachment
        return self._pack, self._unpack

    def _pack(self, tensor: torch.Tensor) -> SavedHandle:
        attachment, engine = self._attachment, self._attachment.engine
        if not attachment.is_open:
            attachment.take_hooks_off()
            return SavedHandle.untouched(tensor)
        if is_scripted():
            return SavedHandle.untouched(tensor)
        if engine.cursor.save_begins_one():
            if attachment.ends_here():
                return SavedHandle.untouched(tensor)
            engine.begin()
        observer = self._observer
        if observer is not None:
            return observer.pack(tensor, engine.pack)
        handle = engine.pack(tensor)
        if self._observer is not None:  # the segment has its policy by this save
            self._observer.packed(tensor, handle)
        return handle

    def _unpack(self, handle: SavedHandle) -> torch.Tensor:
        observer, unpack = self._observer, self._attachment.engine.unpack
        return unpack(handle) if observer is None else observer.unpack(handle, unpack)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self._observer is None else self._observer.around_call(path, call)

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        self._loop.meets(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._loop.stepped(optimizer)
        if not self._attachment.engine.cursor.is_open:
            self._take_off(stepped=True)

    def _take_off(self, *, stepped: bool) -> SegmentObserver | None:
        """The segment has ended: the following events do not belong to it."""
        observer = self._observer
        if observer is not None:
            observer.end(stepped=stepped)
            self._attachment.engine.fallbacks.silent = False
        return observer

    def stands_aside(self) -> None:
        observer = self._observer
        self._observer = self._kind = self._compared = None
        if observer is not None:  # it goes on to rebuild the values that it leaves: a replay may not be verified yet
            self._attachment.engine.fallbacks.silent = False
            observer.end(stepped=False)

    def close(self) -> None:
        if self._observer is not None:  # the loop has ended in a segment, and without leaving its session
            self._take_off(stepped=False)
        for kind in self._loop.kinds.values():
            kind.close()

    def ended(self, segment: Segment) -> None:
        self._segments += 1
        observer, kind = self._take_off(stepped=False), self._kind
        self._observer = self._kind = None
        self._attachment.engine.mechanism.rebuild = rebuild_together
        if self._compared is not None:
            key, base_bytes = self._compared
            self._compared = None
            self._loop.kinds.compared(key, segment, base_bytes)
        elif segment.diverged and self._key is not None:
            self._loop.kinds.part(self._key)
        if observer is None or kind is None:
            return
        kind.has_seen(observer, segment)
        if kind.next_observer is None:
            del observer
            gc.collect()  # so that the study's garbage is not in memory during later steps
            self._plans.profiled(kind)


def _gives_up(policy: StepPolicy) -> bool:
    """Whether values may leave the device from the segment's beginning on."""
    if policy.instructions is not None:
        return any(value.decision is not Decision.KEEP for value in policy.instructions.values)
    return isinstance(policy, SwapEach) and not isinstance(policy, KeepWhileRoom)
