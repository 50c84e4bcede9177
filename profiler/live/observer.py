"""Observer: studies the segments of a running loop, kind by kind, until each kind has a profile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from poochplan.errors import PoochError
from poochplan.formats.plan import Decision
from poochplan.profiler.capture.clock import clock_of
from poochplan.runtime.attachment import Attachment, Hooks, PlanSource
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.mechanism import Mechanism, rebuild_together
from poochplan.runtime.engine.saved_value import Handle, SavedValue
from poochplan.runtime.step_policies.step_policy import KeepAll, KeepWhileRoom, StepPolicy, SwapEach
from poochplan.runtime.metering.census import census_bytes, foreseen_bytes
from poochplan.tensors.signatures import Switches

from .step_kinds import MOST_KINDS, Key, Line, Lines
from .study import StudyOptions, study
from .watch import Scene, Watch

TOO_MANY = "inputs come in too many shapes, none of them often: pad them to a few lengths"
MOST_WARMUP = 8
"""After this many segments without a step of an optimizer, studies begin anyway."""


class Observer(PlanSource):
    """A source of plans that makes no plans: after the study, segments run as they did in it. State: the kinds of
    segments (``lines``), and the active watch.

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
        self.lines = Lines()
        self._optimizer_steps = 0
        self._optimizers = list(optimizers)
        self._after = 0
        self._watch: Watch | None = None
        self._line: Line | None = None
        self._key: Key | None = None
        """The key of the open segment, before its kind is known."""
        self._compared: tuple[Key, int] | None = None
        self._segments = 0
        self._study_options = options
        self._switches = Switches(model)
        self.scene = Scene(model, where, clock_of(where), spill_dir, self._optimizers)

    # -- segments that are not watched -----------------------------------------------------------------------------

    def known(self, key: Key, segment: Segment) -> StepPolicy | Watch | None:
        """The policy of a segment of that kind if it needs no study; a watch if it is to be observed."""
        return None

    def unplanned(self) -> StepPolicy:
        """The step policy of a segment about which nothing is known."""
        return SwapEach(at_once=True)

    def policy(self, line: Line | None) -> StepPolicy:
        """The step policy for a segment whose study is over; None: while larger inputs are still being studied."""
        fits = line is not None and line.profile is not None and line.profile.mode == "run"
        return KeepAll() if fits else SwapEach(at_once=True)

    def profiled(self, line: Line) -> None:
        """The study of a kind is over: it has a profile, or was refused."""

    def is_planning(self, line: Line) -> bool:
        return False

    # -- the chooser ------------------------------------------------------------------------------------------

    def choose(self, segment: Segment) -> StepPolicy | None:
        policy = self._chosen(segment)
        swaps_once = self._watch is not None and self._watch.swaps_once
        if policy is not None and not swaps_once and _gives_up(policy):
            self._attachment.memory_is_short()
        return policy

    def _chosen(self, segment: Segment) -> StepPolicy | None:
        if segment.inputs is None and not segment.saves_next:
            return None
        has_gradients = bool(segment.gradient_bytes)
        own = Key(self._after, segment.ordinal, segment.inputs or (), has_gradients, self._switches.now())
        self._key, key = own, self.lines.kind_of(own)
        known = self.known(key, segment)
        if isinstance(known, Watch):
            self._watch = known
            return known.policy
        if known is not None:
            return known
        if not self._optimizer_steps and self._segments < MOST_WARMUP:
            return self.unplanned()
        if self.lines.may_be_known(key):
            gc.collect()  # as before a capture
            kind = self.scene.where.type
            self._compared = key, census_bytes(kind) + foreseen_bytes(self._optimizers, kind)
            return self.unplanned()
        line = self._line_of(key)
        if line is None or line.next_watch is None:
            return self.policy(line)
        self._line = line
        self._attachment.engine.fallbacks.silent = True
        self._watch = line.next_watch()
        return self._watch.policy

    def begins(self, segment: Segment) -> None:
        if self._watch is not None:
            self._watch.begin(segment)

    def _line_of(self, key: Key) -> Line | None:
        """The study of that kind, which begins here if necessary. None while that of larger inputs is running."""
        beside = [line for other, line in self.lines.items() if other != key and other.is_beside(key)]
        for line in beside:
            if line.waits():
                self.profiled(line)
        if key not in self.lines:
            larger = [line for line in beside if line.key.is_larger(key)]
            if any(line.is_studied or self.is_planning(line) for line in larger):
                return None
            for line in beside:
                if line.is_studied and key.is_larger(line.key):
                    self.forget(line.key)
            line = Line(key, study(self.scene, self._study_options), self.lines.stood(key))
            if sum(one.is_studied for one in self.lines.values()) >= MOST_KINDS:
                line.give_up(TOO_MANY)
                self.profiled(line)
            self.lines[key] = line
        return self.lines[key]

    def forget(self, key: Key) -> None:
        """Segments of that kind are studied anew."""
        self.lines.pop(key, None)

    def rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        (self._watch.rebuild if self._watch is not None else rebuild_together)(value, mechanism)

    # -- what segments do -------------------------------------------------------------------------------------

    def attached(self, attachment: Attachment) -> Hooks:
        self._attachment, engine = attachment, attachment.engine

        def pack(tensor: torch.Tensor) -> Handle:
            if attachment.state == "closed":
                attachment.take_hooks_off()
                return Handle.untouched(tensor)
            if engine.cursor.save_begins_one():
                if attachment.ends_here():
                    return Handle.untouched(tensor)
                engine.begin()
            watch = self._watch
            if watch is not None:
                return watch.pack(tensor, engine.pack)
            handle = engine.pack(tensor)
            if self._watch is not None:  # the segment has its policy by this save
                self._watch.packed(tensor, handle)
            return handle

        def unpack(handle: Handle) -> torch.Tensor:
            watch = self._watch
            return engine.unpack(handle) if watch is None else watch.unpack(handle, engine.unpack)

        return pack, unpack

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self._watch is None else self._watch.around_call(path, call)

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is one for one in self._optimizers):
            self._optimizers.append(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_steps += 1
        self._after = next(index for index, one in enumerate(self._optimizers) if one is optimizer)
        if not self._attachment.engine.cursor.is_open:
            self._take_off(stepped=True)

    def _take_off(self, *, stepped: bool) -> Watch | None:
        """The segment has ended: the following events do not belong to it."""
        watch = self._watch
        if watch is not None:
            watch.end(stepped=stepped)
            self._attachment.engine.fallbacks.silent = False
        return watch

    def close(self) -> None:
        if self._watch is not None:  # the loop has ended in a segment, and without leaving its session
            self._take_off(stepped=False)

    def ended(self, segment: Segment) -> None:
        self._segments += 1
        watch, line = self._take_off(stepped=False), self._line
        self._watch = self._line = None
        if self._compared is not None:
            key, base_bytes = self._compared
            self._compared = None
            self.lines.compared(key, segment, base_bytes)
        elif segment.diverged and self._key is not None:
            self.lines.part(self._key)
        if watch is None or line is None:
            return
        try:
            line.has_seen(watch, segment)
        except (PoochError, OSError) as error:
            line.give_up(str(error))
        if line.next_watch is None:
            del watch
            gc.collect()  # so that the study's garbage is not in memory during later steps
            self.profiled(line)


def _gives_up(policy: StepPolicy) -> bool:
    """Whether values may leave the device from the segment's beginning on."""
    if policy.instructions is not None:
        return any(value.decision is not Decision.KEEP for value in policy.instructions.values)
    return isinstance(policy, SwapEach) and not isinstance(policy, KeepWhileRoom)
