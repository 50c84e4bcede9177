"""StepMeter: the peak of each step and its moment, from the device's allocator. It observes no ops."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Literal, NamedTuple

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Memory
from poochplan.formats.profile_parts import Phase, counted_bytes
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.metering.allocated import PeakBytes, StepPeak
from poochplan.runtime.metering.device_peak import step_peak_of
from poochplan.tensors.modes import around_calls
from poochplan.tensors.storages import gradient_of, own_tensors, plain_storage
from poochplan.torch_private.sharding import rebuilds_buckets
from poochplan.torch_private.tensor_internals import in_backward, storage_identity

from .census import LEAST_BYTES, Storages, bucket_bytes, census, state_of_optimizers, wrapper_of

Known = dict[int, weakref.ref[torch.UntypedStorage]]
"""By identity."""
When = Literal["first-steps", "always", "never"]


class PeakMoment(NamedTuple):
    """A moment in a step, as the points of the runtime's clock that the step has passed."""

    part: Phase
    saves: int
    uses: int


class StepMeter:
    """Meters only the step: from the beginning of its segment to its optimizer's step, or to the next segment.

    A :class:`~poochplan.runtime.metering.allocated.StepPeak` gives the bytes. This needs no dispatch mode, under which
    autograd would use other formulas. The moment of the peak is read at the points of the runtime's clock.

    States: *off*, *on* (in a step), *over* (its figures are valid until the next step begins).

    Parameters
    ----------
    kind: of the device.
    when: ``"always"`` begins each step with a census; ``"first-steps"`` only the steps that are due. Without a compiled
        allocator only these steps are metered.
    """

    def __init__(self, kind: str, when: When) -> None:
        self._kind = kind
        self._when = when
        self._is_due = False
        self.is_certain = False
        """False if this step needed a census when it began and had none. Memory that other threads have allocated and
        this one has freed may then be in the peak."""
        self._small: Known = {}
        """Small storages that existed when this step began. They are left out unless the step uses them."""
        self._met: Known = {}
        """Small storages that earlier steps have used."""
        self._engine: Engine | None = None
        self._open = False
        self._device: ComputeDevice | None = None
        self._reserved_bytes: int | None = None
        self.retries = 0
        """How often the allocator found no room in the step that has ended."""
        self._source: StepPeak | None = None
        """Set from the first step on."""
        self._told: PeakBytes | None = None
        self.unknown = 0
        """How many steps in a row were to be metered, and have no peak: another profiler has the log."""
        self._passed: list[PeakMoment] = []
        """The points that this step has passed, if the moment of the peak is wanted."""
        self._peak_at = 0
        """The passed point that the peak followed."""

    def step_begins(self, engine: Engine, device: ComputeDevice, *, is_due: bool, memory: Memory | None = None) -> None:
        """A segment has begun on this thread. ``is_due``: begin with a census. ``memory``: what the figures count from
        the first step on; None for the most exact that can be counted here.
        """
        self._engine, self._open, self._told = engine, True, None
        self._passed, self._peak_at = [], 0
        if self._when == "never":
            return
        source = self._source = self._source or step_peak_of(device, memory)
        self._device = device
        source.step_begins()
        self._is_due = is_due = is_due or self._when == "always"
        self.is_certain = is_due or not source.needs_census
        engine.mechanism.timed = is_due
        if is_due:
            if source.needs_census:
                source.looked_around(self._live(engine), bucket_bytes(engine.model))
                self._look_behind_new_buckets(engine, source)
            self.point()

    def _look_behind_new_buckets(self, engine: Engine, source: StepPeak) -> None:
        """If the step's first op is that DDP makes other buckets, the step is metered from there on. The allocator may
        not have seen the birth of the old ones, and would count both.
        """
        wrapper = wrapper_of(engine.model)
        if wrapper is None or not rebuilds_buckets(wrapper):
            return

        def is_called(*_: object) -> None:
            stack.close()
            if self._open and self._source is source and engine.segment is segment:
                source.step_begins()
                source.looked_around(self._live(engine), bucket_bytes(engine.model))

        segment, stack = engine.segment, ExitStack()
        stack.enter_context(around_calls(wrapper.module, is_called))

    def point(self, part: Phase | None = None) -> None:
        """A point of the runtime's clock has been passed, or ``part`` of the step begins."""
        if not self._open or not self._is_due:
            return
        self._read()
        if self._source is not None:
            self._source.mark(len(self._passed))
        assert self._engine is not None
        segment = self._engine.segment
        part = part or (Phase.BACKWARD if in_backward() else Phase.FORWARD)
        self._passed.append(PeakMoment(part, segment.saves, segment.uses))

    def step_is_over(self) -> None:
        """Code that runs from here on does not belong to the step. Idempotent."""
        if not self._open:
            return
        self._read()
        if self._device is not None:
            self._reserved_bytes, self.retries = self._device.step_reserved_bytes(), self._device.step_retries()
        self._open = False
        found = self._source.ends() if self._source is not None and self._is_due else None
        if found is not None:
            self._told, self._peak_at = found, found.mark or 0
        if self._is_due and self._when != "never":
            self.unknown = self.unknown + 1 if self._told is None else 0
        self._count_what_was_met()

    def _count_what_was_met(self) -> None:
        """Small storages that the step was given or has saved count from its beginning on, and in later steps."""
        small, self._small = self._small, {}
        if not small:
            return
        engine = self._engine
        given = {id(one()) for one, _ in engine.segment.given} if engine is not None else set()
        for key, reference in small.items():
            storage = reference()
            if storage is not None and engine is not None and (id(storage) in given or engine.tape.known(storage)):
                self._met[key] = reference
                size_bytes = counted_bytes(storage.nbytes())
                if self._told is not None:
                    self._told = PeakBytes(self._told.peak_bytes + size_bytes, self._told.blocks_bytes + size_bytes)

    def uses_arena(self, arena_bytes: int) -> None:
        """The running step uses an arena of that size, which counts as a whole; 0 for none."""
        if self._source is not None:
            self._source.uses_arena(arena_bytes)

    @property
    def source(self) -> StepPeak | None:
        """What gives the bytes, from the first metered step on."""
        return self._source

    @property
    def peak_bytes(self) -> int | None:
        """The peak of this step so far; None if it is not metered, or if a log gives it only at the end of the step."""
        self._read()
        return None if self._told is None else self._told.peak_bytes

    @property
    def blocks_peak_bytes(self) -> int | None:
        """The same without the holes of an arena. Steps are compared by it, because only later steps have an arena."""
        self._read()
        return None if self._told is None else self._told.blocks_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Most bytes that the allocator had taken from the device in this step; None if it takes none."""
        if self._open and self._device is not None:
            return self._device.step_reserved_bytes()
        return self._reserved_bytes

    @property
    def moment(self) -> PeakMoment | None:
        """The moment of the peak; None if the step did not begin with a census."""
        return self._passed[self._peak_at] if self._told is not None and self._peak_at < len(self._passed) else None

    def _read(self) -> None:
        """Reads the allocator. If it reports more than at the last point, the peak comes after that point."""
        found = self._source.now() if self._open and self._source is not None else None
        if found is not None:
            if self._passed and found.peak_bytes > (self._told.peak_bytes if self._told is not None else 0):
                self._peak_at = len(self._passed) - 1
            self._told = found

    def backward(self, begins: bool) -> None:
        """Autograd begins to compute a backward of the step, or has ended."""
        self.point(Phase.BACKWARD if begins else Phase.OPTIMIZER)

    def _live(self, engine: Engine) -> Storages:
        """All storages when a step begins: Python's, those of the model and its optimizers, and autograd's.

        Small storages of no such owner count if a step has used them.
        """
        tensors = [x for own in own_tensors(engine.model) for x in (own, gradient_of(own))]
        tensors += state_of_optimizers(own_tensors(engine.model))
        plain = [plain_storage(one, self._kind) for one in tensors if one is not None]
        found = [storage for storage in (*plain, *engine.segment.left_over_storages()) if storage is not None]
        every, own = census(self._kind, 1), {storage_identity(storage): storage for storage in found}
        self._met = {key: one for key, one in self._met.items() if key in every and one() is every[key]}
        counted = {key: one for key, one in every.items() if one.nbytes() >= LEAST_BYTES or key in self._met} | own
        self._small = {key: weakref.ref(one) for key, one in every.items() if key not in counted}
        return counted


def described(moment: PeakMoment | None, plan: Plan) -> str:
    """The moment in words, with the layer that saves or uses a value there; empty if it is not known."""
    if moment is None:
        return ""
    saves, point = len(plan.values), 0
    if moment.part is Phase.FORWARD:
        point = min(moment.saves + 1, saves)
    elif moment.part is Phase.BACKWARD and moment.uses:
        point = saves + moment.uses
    layer = layer_at(plan, point)
    return f"{moment.part}{f' of {layer}' if layer else ''}"


def layer_at(plan: Plan, point: int) -> str:
    """The layer that saves or uses a value at that point of the runtime's clock, from 1 on; empty if there is none."""
    saves = len(plan.values)
    if 0 < point <= saves:
        return plan.values[point - 1].layer
    if saves < point <= saves + len(plan.uses):
        return plan.values[plan.handles[plan.uses[point - saves - 1]]].layer
    return ""
