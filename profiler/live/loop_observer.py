"""LoopObserver: studies the segments of a running loop, kind by kind, until each kind has a profile."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from poochplan.formats.plan import Decision
from poochplan.profiler.capture.clock import clock_of
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.mechanism import Mechanism, Rebuild, rebuild_together
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.metering.census import census_bytes, foreseen_bytes
from poochplan.runtime.plan_source import Attached, PlanSource
from poochplan.runtime.step_policies.step_policy import KeepAll, KeepWhileRoom, StepPolicy, SwapEach
from poochplan.tensors.signatures import model_switches
from poochplan.torch_private.hooks import Hooks
from poochplan.torch_private.tensor_internals import is_scripted

from .segment_observer import SegmentObserver, StudyContext
from .step_kinds import MOST_KINDS, TOO_MANY, Key, StepKind, StepKinds
from .study import StudyOptions, study

MOST_WARMUP = 8
"""After this many segments without a step of an optimizer, studies begin anyway."""


class LoopObserver(PlanSource):
    """A source of plans that makes no plans: after the study, segments run as they did in it. State: the kinds of
    segments (``kinds``), and the active observer.

    Parameters
    ----------
    model: all of the models together.
    optimizers: the known ones; others are found when they step.
    where: the models' device.
    options: of each kind's study.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        where: torch.device,
        options: StudyOptions,
        spill_dir: str | Path | None = None,
    ) -> None:
        self.kinds = StepKinds()
        self._optimizer_steps = 0
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int](zip(optimizers, itertools.count()))
        """With their places. A new optimizer gets that of one that is gone."""
        self._after = 0
        self._observer: SegmentObserver | None = None
        self._rebuild: Rebuild = rebuild_together
        """Of the values that an observer has left behind: a replay that it tries has not been verified."""
        self._kind: StepKind | None = None
        self._key: Key | None = None
        """The key of the open segment, before its kind is known."""
        self._longest: dict[Key, int] = {}
        """Number of values that the longest segment of a kind has saved, if it is studied again for that."""
        self._compared: tuple[Key, int] | None = None
        self._segments = 0
        self._study_options = options
        self.context = StudyContext(model, where, clock_of(where), spill_dir, self._optimizers)

    # -- segments that are not observed ---------------------------------------------------------------------------

    def known(self, key: Key, segment: Segment) -> StepPolicy | SegmentObserver | None:
        """The policy of a segment of that kind if it needs no study; an observer if it is to be observed."""
        return None

    def unplanned(self) -> StepPolicy:
        """The step policy of a segment about which nothing is known."""
        return SwapEach(at_once=True)

    def policy(self, kind: StepKind | None) -> StepPolicy:
        """The step policy for a segment whose study is over; None: while larger inputs are still being studied."""
        fits = kind is not None and kind.profile is not None and kind.profile.mode == "run"
        return KeepAll() if fits else SwapEach(at_once=True)

    def profiled(self, kind: StepKind) -> None:
        """The study of a kind is over: it has a profile, or was refused."""

    def is_planning(self, kind: StepKind) -> bool:
        return False

    # -- the chooser ------------------------------------------------------------------------------------------

    def choose(self, segment: Segment) -> StepPolicy | None:
        policy = self._chosen(segment)
        self._attachment.engine.planned.is_off = self._observer is not None  # which looks at each save and use
        swaps_once = self._observer is not None and self._observer.swaps_once
        if policy is not None and not swaps_once and _gives_up(policy):
            self._attachment.memory_is_short()
        return policy

    def _chosen(self, segment: Segment) -> StepPolicy | None:
        if segment.inputs is None and not segment.saves_next:
            return None
        has_gradients = bool(segment.gradient_bytes)
        is_updated = self._optimizer_steps or self._segments < MOST_WARMUP
        place = segment.ordinal if is_updated else 0  # where no known optimizer steps, there are no places
        own = Key(self._after, place, segment.inputs or (), has_gradients, model_switches(self.context.model))
        self._key, key = own, self.kinds.key_of(own)
        known = self.known(key, segment)
        if isinstance(known, SegmentObserver):
            self._observer = known
            return known.policy
        if known is not None:
            return known
        if not self._optimizer_steps and self._segments < MOST_WARMUP:
            return self.unplanned()
        if self.kinds.may_be_known(key):
            gc.collect()  # as before a capture
            device_type = self.context.where.type
            self._compared = key, census_bytes(device_type) + foreseen_bytes(self._optimizers, device_type)
            return self.unplanned()
        kind = self._kind_of(key)
        if kind is None or kind.next_observer is None:
            return self.policy(kind)
        self._observer = kind.new_observer()
        if self._observer is None:
            self.profiled(kind)
            return self.policy(kind)
        self._kind = kind
        self._attachment.engine.fallbacks.silent = True
        return self._observer.policy

    def begins(self, segment: Segment) -> None:
        if self._observer is not None:
            self._observer.begin(segment)

    def _kind_of(self, key: Key) -> StepKind | None:
        """The study of that kind, which begins here if necessary. None while that of larger inputs is running."""
        beside = [kind for other, kind in self.kinds.items() if other != key and other.is_beside(key)]
        for kind in beside:
            if kind.waits():
                self.profiled(kind)
        if key not in self.kinds:
            larger = [kind for kind in beside if kind.key.is_larger(key)]
            if any(kind.is_studied or self.is_planning(kind) for kind in larger):
                return None
            for kind in beside:
                if kind.is_studied and key.is_larger(kind.key):
                    self.forget(kind.key)
            new_study = partial(study, self.context, self._study_options)
            kind = StepKind(key, new_study, self.kinds.stood(key), self._longest.get(key, 0))
            if sum(one.is_studied for one in self.kinds.values()) >= MOST_KINDS:
                kind.give_up(TOO_MANY)
                self.profiled(kind)
            self.kinds[key] = kind
        return self.kinds[key]

    def forget(self, key: Key) -> None:
        """Segments of that kind are studied anew."""
        self.kinds.pop(key, None)

    def rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        (self._observer.rebuild if self._observer is not None else self._rebuild)(value, mechanism)

    # -- what segments do -------------------------------------------------------------------------------------

    def attached(self, attachment: Attached) -> Hooks:
        self._attachment, engine = attachment, attachment.engine

        def pack(tensor: torch.Tensor) -> SavedHandle:
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

        def unpack(handle: SavedHandle) -> torch.Tensor:
            observer = self._observer
            return engine.unpack(handle) if observer is None else observer.unpack(handle, engine.unpack)

        return pack, unpack

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self._observer is None else self._observer.around_call(path, call)

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            taken = set(self._optimizers.values())
            self._optimizers[optimizer] = next(place for place in itertools.count() if place not in taken)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizing(optimizer)  # one that was new while the session rested
        self._optimizer_steps += 1
        self._after = self._optimizers[optimizer]
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
        if observer is not None:
            self._rebuild = observer.rebuild
            self._attachment.engine.fallbacks.silent = False
            observer.end(stepped=False)

    def close(self) -> None:
        if self._observer is not None:  # the loop has ended in a segment, and without leaving its session
            self._take_off(stepped=False)
        for kind in self.kinds.values():
            kind.close()

    def ended(self, segment: Segment) -> None:
        self._segments += 1
        observer, kind = self._take_off(stepped=False), self._kind
        self._observer = self._kind = None
        if self._compared is not None:
            key, base_bytes = self._compared
            self._compared = None
            self.kinds.compared(key, segment, base_bytes)
        elif segment.diverged and self._key is not None:
            self.kinds.part(self._key)
        if observer is None or kind is None:
            return
        kind.has_seen(observer, segment)
        if kind.next_observer is None:
            del observer
            gc.collect()  # so that the study's garbage is not in memory during later steps
            self.profiled(kind)


def _gives_up(policy: StepPolicy) -> bool:
    """Whether values may leave the device from the segment's beginning on."""
    if policy.instructions is not None:
        return any(value.decision is not Decision.KEEP for value in policy.instructions.values)
    return isinstance(policy, SwapEach) and not isinstance(policy, KeepWhileRoom)
