"""Capturing: the segment whose ops and values are recorded. Every value is swapped, so that memory cannot run out."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from poochplan.formats.occupancy import Floats
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Device, Kind, Link, Phase, PointKind, Profile, preset_link
from poochplan.formats.profile_parts import OptimizerState, rounded_up
from poochplan.profiler.assembly.assemble import assemble, model_notes, step_notes, this_machine
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.capture.clock import library_bytes
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import Lease, SavedHandle
from poochplan.runtime.metering.census import LEAST_BYTES, bucket_bytes, census, census_bytes
from poochplan.runtime.replays.replay import StorageRecord
from poochplan.runtime.step_policies.step_policy import SwapEach
from poochplan.tensors.modes import around_calls
from poochplan.tensors.optimizers import inner_of, is_away, is_separable, movable_state, parameters_of
from poochplan.tensors.signatures import input_signature, tensor_leaves
from poochplan.tensors.storages import bytes_of, gradient_of, has_storage, parts_of
from poochplan.torch_private.sharding import is_sharded, local_tensor
from poochplan.torch_private.tensor_internals import pytree

from .segment_observer import PackHook, SegmentObserver, StudyContext, UnpackHook

NAMED = 100
"""Each of this many largest tensors outside the step is a value; all others together are one value."""


class Moving(SwapEach):
    """Swaps every value that the step has made. In a loop, earlier values stay if other code holds them."""

    def __init__(self, capture: Capture, *, all_of_it: bool) -> None:
        super().__init__(at_once=True)
        self._capture, self._all_of_it = capture, all_of_it

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        number = self._capture.lifetimes.find(tensor)
        if self._all_of_it or (number >= 0 and self._capture.values[number].born >= 0):
            return Decision.SWAP
        return super().saved(index, ordinal, tensor, record)


class Capturing(SegmentObserver):
    """``capture`` has the segment's ops and values, ``kinds`` the values' kinds, ``optimizers`` what of the optimizers'
    state may leave the device, ``beside_bytes`` other memory. The first kind that is noted for a value counts.
    """

    def __init__(self, context: StudyContext, capture: Capture | None = None, before: Capture | None = None) -> None:
        """``capture``: for a step without memory, which has its own hooks. ``before``: of the step before, if values
        of it live on.
        """
        self.capture = capture or Capture(context.model, context.where)
        super().__init__(context, Moving(self.capture, all_of_it=context.is_repeated) if capture is None else None)
        self.swaps_once = True
        self.instrument = self.capture
        self.kinds: dict[int, Kind] = {}
        self.optimizers: list[OptimizerState] = []
        self.beside_bytes = 0
        self.has_gradients = False
        self._number = self._bucket_bytes = 0
        self._used: weakref.ref[Lease] | None = None
        self._before = before
        self._given: list[weakref.ref[torch.Tensor]] = []
        """The arguments of the model's calls."""
        self._model_notes: list[str] = []
        """Notes on the model, as the step has left it."""

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self._number = segment.number
        self.capture.inputs, self.capture.is_called = segment.inputs, not self.context.is_repeated
        self.has_gradients = any(gradient_of(one) is not None for one in self.context.model.parameters())
        gc.collect()  # so that garbage does not count for the step
        self._look_around(segment)
        with (
            collected_after(self.capture, () if self.context.is_repeated else self.kinds),
            around_calls(self.context.model, self._called) if self.context.is_repeated else contextlib.nullcontext(),
            self.capture.running(),
        ):
            yield

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.capture.is_called = True
        if self.capture.inputs is None:
            self.capture.inputs = input_signature(args, kwargs)
        given = (tensor for _, tensor in (*tensor_leaves("", args), *tensor_leaves("", kwargs)))
        self._given += map(weakref.ref, given)

    def _look_around(self, segment: Segment) -> None:
        """Records the memory before the segment: that of the model and the optimizers, and that outside the step."""
        model = self.context.model
        self._bucket_bytes = bucket_bytes(model)
        self._note(model.parameters(), Kind.PARAMETER)
        self._note(model.buffers(), Kind.BUFFER)
        for optimizer in self.context.optimizers:
            self._note_state(inner_of(optimizer))
        if self.has_gradients:
            self._note_gradients()
        if self.context.there_before is not None:
            self._note(self.context.there_before(), Kind.INPUT)  # last: those of the model keep their kinds
            if self._before is not None:
                self.capture.inherit(self._before)
            return
        for value in (reference() for reference in segment.left_over):
            if value is not None:
                self.capture.begins_with(value)
        storages = [bytes_of(storage) for storage in census(self.context.where.type, 1).values()]
        others = sorted((one for one in storages if self.capture.lifetimes.find(one) < 0), key=lambda one: -one.nbytes)
        self._note(others[:NAMED], Kind.INPUT)
        self.beside_bytes = sum(rounded_up(one.nbytes) for one in others[NAMED:])
        self.look_around(segment)

    @property
    def lives_on(self) -> bool:
        """Whether values of the step, besides gradients and the like, are held after it: by nodes of the loss's graph,
        by attributes of the model, or by autograd for an output that is no part of the loss.
        """
        held = self.capture.lifetimes.held() - self.kinds.keys()
        return sum(self.capture.values[number].size_bytes for number in held) >= LEAST_BYTES

    @property
    def is_retained(self) -> bool:
        return self._used is not None and self._used() is not None

    def _note(self, tensors: Iterable[Any], kind: Kind, *, is_new: bool = False) -> None:
        """Sets the kind of these tensors, and of the tensors that sparse and nested ones consist of; with ``is_new``
        only of those that the step has not met yet.
        """
        for tensor in tensors:
            for part in parts_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                if not has_storage(part, self.capture.device_type) and not is_away(part):
                    continue
                if not is_new or self.capture.lifetimes.find(part) < 0:
                    self.kinds.setdefault(self.capture.value_of(part), kind)

    def _note_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the kind of an optimizer's state, and records what of it may leave the device."""
        parameters, before = parameters_of(optimizer), set(self.kinds)
        movable = [movable_state(optimizer, one) for one in parameters]
        self._note(pytree.tree_leaves(list(optimizer.state.values())), Kind.OPTIMIZER_STATE)
        if set(self.context.model.parameters()).isdisjoint(parameters):
            return
        left, found = self.kinds.keys() - before, list[tuple[int, ...]]()
        for tensors in movable:
            found.append(tuple(number for number in map(self.capture.lifetimes.find, tensors) if number in left))
            left.difference_update(found[-1])  # a value is listed once
        name = type(optimizer).__name__
        self.optimizers.append(OptimizerState(name=name, separable=is_separable(optimizer), parameters=tuple(found)))

    def _note_gradients(self) -> None:
        """Sets the kind of the gradients that exist. FSDP2 makes some after the last op of a backward."""
        gradients = [one for one in map(gradient_of, self.context.model.parameters()) if one is not None]
        if self.phase is Phase.OPTIMIZER and is_sharded(self.context.model):
            for one in gradients:
                self.capture.arise(one)
        self._note(gradients, Kind.GRADIENT)

    @functools.cached_property
    def _library_bytes(self) -> int:
        return library_bytes(self.context.where)

    def draft(
        self,
        mode: Literal["run", "swap-all", "fake"],
        runs: Floats,
        measured: list[PhaseSeconds],
        notes: list[str],
        *,
        link: Link,
        workload: str = "",
        device: Device | None = None,
    ) -> Profile:
        """The profile of the captured step, its ops' seconds reconciled with the ``measured`` steps."""
        return assemble(
            self.capture,
            self.kinds,
            runs,
            measured,
            link=link,
            workload=workload,
            mode=mode,
            device=device or this_machine(self.context.where),
            notes=[*self._model_notes, *step_notes(self.capture, self.kinds, is_fake=mode == "fake"), *notes],
            optimizers=tuple(self.optimizers),
            accumulate=self.has_gradients,
            held_bytes={
                ("cublas", Kind.LIBRARY): self._library_bytes,
                ("beside", Kind.INPUT): self.beside_bytes + self._unmet_bucket_bytes(),
            },
        )

    def _unmet_bucket_bytes(self) -> int:
        """Bytes of data-parallel training's buckets that no op of the step used: Python knows no tensor on them."""
        met = (one for number, one in enumerate(self.capture.values) if one.born < 0 and number not in self.kinds)
        return max(0, self._bucket_bytes - sum(rounded_up(one.size_bytes) for one in met))

    def untimed(self, mode: Literal["run", "fake"]) -> Profile:
        """A profile with values and lifetimes alone: the link is a preset, and no step was timed."""
        return self.draft(mode, self.capture.durations(), [dict.fromkeys(Phase, 0.0)], [], link=preset_link("pcie4"))

    def grown_bytes(self) -> int:
        """Bytes outside the steps of a loop that exist now, or will, and did not when this step was captured."""
        if self.context.is_repeated:
            return 0
        return max(self.foreseen_bytes, census_bytes(self.context.where.type) - (self.base_bytes or 0))

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.capture.phase = phase
        if phase is Phase.OPTIMIZER:
            self._note_gradients()

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        self._note((one() for one in self._given), Kind.INPUT, is_new=True)  # those that no op has used
        self._model_notes = model_notes(self.context.model)

    def runs_another(self) -> None:
        if not self.context.is_repeated:
            self.capture.nodes.runs_another()

    def pack(self, tensor: torch.Tensor, pack: PackHook) -> SavedHandle:
        with self.capture.set_aside():
            handle = pack(tensor)
        self.packed(tensor, handle)
        return handle

    def packed(self, tensor: torch.Tensor, handle: SavedHandle) -> None:
        if self.phase is not Phase.FORWARD and handle.value is not None:
            self.why_not, self.is_final = "it saves more after its backward has begun", True
        self.capture.packed(tensor, handle)

    def unpack(self, handle: SavedHandle, unpack: UnpackHook) -> torch.Tensor:
        value = handle.value
        if value is None or handle.segment != self._number:
            return unpack(handle)
        if not handle.used:
            self.capture.passes(PointKind.USE, handle.ordinal)
        with self.capture.set_aside():
            tensor = unpack(handle)
        used = self._used() if self._used is not None else None
        if used is None:
            used = Lease(handle.lease, None if handle.lease is None else handle.lease.late_uses)
            self._used = weakref.ref(used)
        handle.lease = used
        self.capture.is_back(value, local_tensor(tensor).untyped_storage())
        return tensor
