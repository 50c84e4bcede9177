"""StepMeter: what each step took at most, and where in it; by the allocator where that tells, by ops now and then."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import torch

from poochplan.formats.plan import Instructions
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Memory
from poochplan.runtime.devices.device import Device
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.metering.allocated import AllocatedPeak
from poochplan.runtime.metering.meter import LiveBytesMeter
from poochplan.tensors.storages import own_tensors, plain_storage
from poochplan.torch_private.tensor_internals import in_backward, storage_identity

from .census import census

When = Literal["first-steps", "always", "never"]
EVERY = 50
"""Of the steps behind the first ones, every so many is metered by its ops: memory changes in a long run, too."""


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

    States: *off*, *on* (in a step), *over* (its figures stand until the next begins).

    Parameters
    ----------
    kind: of the device.
    when: ``"first-steps"`` meters ops while :meth:`settled` was not called, and then in one step of :data:`EVERY`.
    memory: what is told where both are known. On the CPU the compiled allocator tells what is allocated, from the first
        step on whose ops are metered.

    unseen_bytes: how far above the live peak the predicted one is. It is added where the plan is of allocated bytes and
        this process has no compiled allocator, so that like is compared with like.

    ``mode`` has to be among the engine's observers.
    """

    def __init__(self, kind: str, when: When, memory: Memory = Memory.ALLOCATED, unseen_bytes: int = 0) -> None:
        self.mode = LiveBytesMeter(kind, ALLOCATION_UNIT_BYTES, self._where)
        by_allocator = kind == "cpu" and when != "never" and memory is Memory.ALLOCATED
        self._of_cpu = AllocatedPeak() if by_allocator else None
        self._unseen_bytes = 0
        if self._of_cpu is not None:
            self.mode.met = self._of_cpu.met
            self._unseen_bytes = 0 if self._of_cpu.has_allocator else unseen_bytes
        self._kind = kind
        self._when = when
        self._is_settled = False
        self._is_to_check = False
        self.is_certain = False
        """False where the compiled allocator alone tells this step's peak, without a census as it began: what other
        threads have made and this one has let go of may be in it.
        """
        self._steps = 0
        self._engine: Engine | None = None
        self._open = False
        self._counted: int | None = None
        self._allocated: int | None = None
        self._blocks: int | None = None

    def step_begins(self, engine: Engine, device: Device) -> None:
        """A segment has begun on this thread."""
        self._engine, self._device = engine, device
        self._open, self._counted, self._allocated, self._blocks = True, None, None, None
        self._steps += 1
        if self._when == "never":
            return
        device.start_step_peak()
        if self._of_cpu is not None:
            self._of_cpu.step_begins()
        is_due = self._when == "always" or not self._is_settled or self._is_to_check or self._steps % EVERY == 0
        self.is_certain, self._is_to_check = is_due or self._of_cpu is None, False
        engine.mechanism.timed = is_due
        if is_due:
            storages = self._live(engine)
            self.mode.begin(storages)
            if self._of_cpu is not None:
                self._of_cpu.looked_around(self.mode.storages)
            if not self.tells_every_step or not self._is_settled or self._when == "always":
                self.mode.switch_on()  # else the allocator tells, and ops run as they do without a mode

    @property
    def tells_every_step(self) -> bool:
        """Whether the compiled allocator tells what steps take, whose ops then need no mode."""
        return self._of_cpu is not None and self._of_cpu.has_allocator

    def around_backward(self, run: Callable[[], Any]) -> Any:
        """What ``run()`` gives, a backward whose gradients are used: no mode looks on.

        Where the allocator does not tell what it takes, it is metered as a compiled region is, as a whole.
        """
        if not self.mode.is_on or self._engine is None:
            return run()
        with self.mode.away():
            if self.tells_every_step:
                return run()
            return self.mode.around_backward(run, own_tensors(self._engine.model))

    def step_is_over(self) -> None:
        """What runs from here on is not of the step. Idempotent."""
        if self._open:
            self._read()
            self._open = False
            self.mode.switch_off()

    def served_from(self, arena_bytes: int) -> None:
        """The step that runs has an arena of so many bytes, or none (0): it counts whole."""
        if self._of_cpu is not None:
            self._of_cpu.arena_bytes = arena_bytes

    def close(self) -> None:
        """No step is metered any more. In a backward its mode could only be muted: it is taken off here."""
        self.step_is_over()
        self.mode.switch_off()

    def check_next(self) -> None:
        """The next step begins at a census."""
        self._is_to_check = True

    def settled(self, is_settled: bool) -> None:
        """Whether steps are as those before: then few of them are metered by their ops."""
        self._is_settled = is_settled

    @property
    def peak_bytes(self) -> int | None:
        """The most of this step so far; None where it is not metered."""
        self._read()
        if self._of_cpu is not None and self._of_cpu.is_known and self._allocated is not None:
            return self._allocated
        return self._counted if self._allocated is None else max(self._allocated, self._counted or 0)

    @property
    def blocks_peak_bytes(self) -> int | None:
        """The same without the holes of an arena: what steps are compared by, since an arena comes after some."""
        peak_bytes = self.peak_bytes
        return peak_bytes if self._blocks is None else self._blocks

    @property
    def moment(self) -> Moment | None:
        """Where that was; None where the step's ops were not metered."""
        found = self.mode.at_peak
        return found if self._counted is not None and isinstance(found, Moment) else None

    def _read(self) -> None:
        if self._open and self._when != "never":
            self._allocated = self._device.step_peak_bytes()
            if self.mode.is_on:
                self._counted = self.mode.peak_bytes + self._unseen_bytes
            if self._allocated is None and self._of_cpu is not None and self._of_cpu.is_known:
                self._allocated = self._of_cpu.peak_bytes
                self._blocks = self._of_cpu.blocks_peak_bytes

    def _where(self) -> Moment:
        assert self._engine is not None
        segment = self._engine.segment
        part = Part.BACKWARD if in_backward() else Part.OPTIMIZER if segment.used else Part.FORWARD
        return Moment(part, segment.saves, segment.uses)

    def _live(self, engine: Engine) -> dict[int, torch.UntypedStorage]:
        """All that is there as a step begins: what Python knows, the model's whatever its size, what autograd holds."""
        found = census(self._kind)
        for tensor in own_tensors(engine.model):
            for one in (tensor, tensor.grad if tensor.is_leaf else None):
                storage = plain_storage(one, self._kind) if one is not None else None
                if storage is not None:
                    found[storage_identity(storage)] = storage
        for storage in engine.left_over_storages():
            found[storage_identity(storage)] = storage
        return found
