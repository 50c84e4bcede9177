"""StepMeter: what each step took at most, and where in it, as the device's allocator tells; no op is looked at."""

from __future__ import annotations

import weakref
from enum import StrEnum
from typing import Literal, NamedTuple

import torch

from poochplan.formats.plan import Instructions, Plan
from poochplan.formats.profile import Memory
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, rounded_up
from poochplan.runtime.devices.device import Device
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.metering.allocated import StepPeak, Told
from poochplan.runtime.metering.device_peak import step_peak_of
from poochplan.tensors.storages import own_tensors, plain_storage
from poochplan.torch_private.tensor_internals import in_backward, storage_identity

from .census import LEAST_BYTES, Storages, bucket_bytes, census, state_of_optimizers
from .holders import Holder, Own, holders

Known = dict[int, weakref.ref[torch.UntypedStorage]]
"""By identity."""
When = Literal["first-steps", "always", "never"]


class Part(StrEnum):
    """Of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Moment(NamedTuple):
    """Where in a step: the points of the runtime's clock that it has passed."""

    part: Part
    saves: int
    uses: int

    def layer(self, instructions: Instructions) -> str:
        """The layer that saves or uses there, in the words of a plan; empty where none does."""
        if self.part is Part.FORWARD and instructions.values:
            return instructions.values[min(self.saves, len(instructions.values) - 1)].layer
        if self.part is Part.BACKWARD and 0 < self.uses <= len(instructions.uses):
            return instructions.values[instructions.handles[instructions.uses[self.uses - 1]]].layer
        return ""


class StepMeter:
    """Only the step is metered: from where its segment begins to its optimizer's step, or to the next segment.

    A :class:`~poochplan.runtime.metering.allocated.StepPeak` tells. No dispatch mode is needed, under which autograd
    would take other formulas. Where the peak was is read at the points of the runtime's clock.

    States: *off*, *on* (in a step), *over* (its figures stand until the next begins).

    Parameters
    ----------
    kind: of the device.
    when: ``"always"`` begins each step at a census, and ``"first-steps"`` those that are said to. Without a compiled
        allocator these steps alone are metered.
    memory: what the figures count.
    """

    def __init__(self, kind: str, when: When, memory: Memory = Memory.ALLOCATED) -> None:
        self._memory = memory
        self._kind = kind
        self._when = when
        self._is_due = False
        self.is_certain = False
        """False where this step's peak was told without a census as it began, which it needs: what other threads have
        made and this one has let go of may be in it.
        """
        self._small: Known = {}
        """Small storages that were there as this step began, and are left out unless the step meets them."""
        self._met: Known = {}
        """Such ones that earlier steps have met."""
        self._engine: Engine | None = None
        self._open = False
        self._source: StepPeak | None = None
        """From the first step on."""
        self._told: Told | None = None
        self._passed: list[Moment] = []
        """The points of this step, where it is to be known which of them the peak was behind."""
        self._peak_at = 0
        """Behind which of them."""

    def step_begins(self, engine: Engine, device: Device, *, is_due: bool) -> None:
        """A segment has begun on this thread; ``is_due``: at a census."""
        self._engine, self._open, self._told = engine, True, None
        self._passed, self._peak_at = [], 0
        if self._when == "never":
            return
        source = self._source = self._source or step_peak_of(device, self._memory)
        source.step_begins()
        self._is_due = is_due = is_due or self._when == "always"
        self.is_certain = is_due or not source.needs_census
        engine.mechanism.timed = is_due
        if is_due:
            if source.needs_census:
                source.looked_around(self._live(engine), bucket_bytes(engine.model))
            self.point()

    def point(self, part: Part | None = None) -> None:
        """A point of the runtime's clock has been passed, or ``part`` of the step begins."""
        if not self._open or not self._is_due:
            return
        self._read()
        if self._source is not None:
            self._source.mark(len(self._passed))
        self._passed.append(self._where(part))

    def step_is_over(self) -> None:
        """What runs from here on is not of the step. Idempotent."""
        if not self._open:
            return
        self._read()
        self._open = False
        found = self._source.ends() if self._source is not None and self._is_due else None
        if found is not None:
            self._told, self._peak_at = found, found.mark or 0
        self._count_what_was_met()

    def _count_what_was_met(self) -> None:
        """Small storages that the step was given or has saved count from its begin on, and in steps to come."""
        small, self._small = self._small, {}
        engine = self._engine
        given = {id(one()) for one, _ in engine.segment.given} if engine is not None else set()
        for key, reference in small.items():
            storage = reference()
            if storage is not None and engine is not None and (id(storage) in given or engine.tape.has_met(storage)):
                self._met[key] = reference
                size_bytes = rounded_up(storage.nbytes()) if storage.nbytes() >= LEAST_COUNTED_BYTES else 0
                if self._told is not None:
                    self._told = Told(self._told.peak_bytes + size_bytes, self._told.blocks_bytes + size_bytes)

    def served_from(self, arena_bytes: int) -> None:
        """The step that runs has an arena of so many bytes, or none (0): it counts whole."""
        if self._source is not None:
            self._source.arena_bytes = arena_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The most of this step so far; None where it is not metered, and until its end where a log has it."""
        self._read()
        return None if self._told is None else self._told.peak_bytes

    @property
    def blocks_peak_bytes(self) -> int | None:
        """The same without the holes of an arena: what steps are compared by, since an arena comes after some."""
        self._read()
        return None if self._told is None else self._told.blocks_bytes

    @property
    def moment(self) -> Moment | None:
        """Where that was; None where the step did not begin at a census."""
        return self._passed[self._peak_at] if self._told is not None and self._peak_at < len(self._passed) else None

    def _read(self) -> None:
        """What the allocator tells by now. Where it is more than at the last point, the peak is behind that."""
        found = self._source.now() if self._open and self._source is not None else None
        if found is not None:
            if self._passed and found.peak_bytes > (self._told.peak_bytes if self._told is not None else 0):
                self._peak_at = len(self._passed) - 1
            self._told = found

    def backward(self, begins: bool) -> None:
        """Autograd begins to compute a backward of the step, or has ended."""
        self.point(Part.BACKWARD if begins else Part.OPTIMIZER)

    def _where(self, part: Part | None) -> Moment:
        assert self._engine is not None
        segment = self._engine.segment
        return Moment(part or (Part.BACKWARD if in_backward() else Part.FORWARD), segment.saves, segment.uses)

    def _live(self, engine: Engine) -> Storages:
        """All that is there as a step begins: what Python knows, the model's and its optimizers', what autograd holds.

        Small ones that are none of these count where a step has met them.
        """
        every, own = census(self._kind, 1), self._own(engine)
        self._met = {key: one for key, one in self._met.items() if key in every and one() is every[key]}
        counted = {key: one for key, one in every.items() if one.nbytes() >= LEAST_BYTES or key in self._met} | own
        self._small = {key: weakref.ref(one) for key, one in every.items() if key not in counted}
        return counted

    def _own(self, engine: Engine) -> Storages:
        own = list(own_tensors(engine.model))
        tensors = [one for tensor in own for one in (tensor, tensor.grad if tensor.is_leaf else None)]
        tensors += state_of_optimizers(own)
        plain = [plain_storage(one, self._kind) for one in tensors if one is not None]
        found = [storage for storage in (*plain, *engine.left_over_storages()) if storage is not None]
        return {storage_identity(storage): storage for storage in found}


def described(moment: Moment | None, plan: Plan) -> str:
    """The moment in words; empty where it is not known."""
    if moment is None:
        return ""
    layer = moment.layer(plan.instructions)
    return f"{moment.part}{f' of {layer}' if layer else ''}"


def held_beside(engine: Engine, segment: Segment, plan: Plan) -> list[Holder]:
    """Who holds more on the engine's device than the plan of that segment knows of."""
    inputs = [(reference(), size_bytes) for reference, size_bytes in segment.given]
    own = Own(engine.model_of(segment), engine.left_over_storages(), segment.left_over_bytes, inputs, plan.static_bytes)
    return holders(engine.device.kind, own)
