"""Recorded ops, and running them again from given contents: under their grad mode, generator states and switches."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from poochplan.runtime.devices.backend import Generator
from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.operators import ArgumentTree, Flat, outputs_of, unflatten
from poochplan.tensors.storages import Geometry, bytes_of
from poochplan.torch_private.switches import SwitchesAsRecorded, SwitchState
from poochplan.torch_private.tensor_internals import outside_transforms

if TYPE_CHECKING:
    from .replay import StorageRecord

Leaves = dict[tuple["StorageRecord", int], torch.UntypedStorage]
"""The starting points of a replay: the storage of each content that it does not build."""
Parts = list[tuple["StorageRecord", torch.Tensor]]
"""Storages that a replay reads and the step has not made, with their bytes in place."""
Around = Callable[[Parts], contextlib.AbstractContextManager[None]]
"""Returns the block in which a replay's ops run."""

# A tape makes several of these for each op. The garbage collector ignores them (``gc=False``), because its work on them
# would take longer than recording. Ops and records have reference cycles, which the tape itself breaks.


class View(msgspec.Struct, gc=False, eq=False):
    """A tensor argument: its geometry, and the content that it read."""

    record: StorageRecord
    generation: int
    """Number of recorded writes to the storage before it was read."""
    geometry: Geometry
    probe: tuple[torch.Tensor, int] | None
    """For a storage that cannot be rebuilt: a version probe, and the version that was read."""
    source: tuple[torch.Tensor, int] | None = None
    """The same for an argument of which the op may make a larger copy."""


class Scratch(NamedTuple):
    """Stands for running statistics in training: a replay gives the op a temporary tensor in their place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Birth(msgspec.Struct, gc=False, eq=False):
    """A storage that an op has created, and the position of its tensor among the op's flat outputs."""

    position: int
    record: StorageRecord


class RecordedOp(msgspec.Struct, gc=False, eq=False):
    """One op as it was called."""

    order: int
    func: Any
    arguments: tuple[Any, ...]
    """Flat arguments, tensors as :class:`View`."""
    reads: tuple[View, ...]
    """Those of the arguments that are views."""
    spec: ArgumentTree
    grad_enabled: bool
    """Some kernels depend on it (oneDNN's LSTM returns its workspace only with it)."""
    usable: bool = True
    """Whether it can be run again."""
    uninitialised: bool = False
    """Creates storages with undefined contents."""
    overwrites: StorageRecord | None = None
    """The storage whose every byte it writes without reading one."""
    births: tuple[Birth, ...] = ()
    writes: tuple[StorageRecord, ...] = ()
    """Storages from before the op that it writes in place."""
    generator: Generator | None = None
    state: bytearray | None = None
    """Generator state before the op, when it is random."""
    switches: SwitchState | None = None
    """How torch's switches were; None for those of now."""


def run_ops(
    ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
) -> dict[StorageRecord, torch.UntypedStorage]:
    """Runs the ops in order and returns the storages of the records in ``keep``; frees others after their last use."""
    last_use = {view.record: op.order for op in ops for view in op.reads}
    built: dict[StorageRecord, torch.UntypedStorage] = {}
    with outside_transforms(), contextlib.ExitStack() as stack:  # it makes no graph, because its inputs are detached
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        with_gradients, switches = torch.is_grad_enabled(), stack.enter_context(SwitchesAsRecorded())
        for op in ops:
            if op.switches is not None:
                switches.turn(op.switches)
            if op.grad_enabled is not with_gradients:
                with_gradients = op.grad_enabled
                stack.enter_context(torch.set_grad_enabled(with_gradients))
            outputs = _call(op, there, built)
            for birth in op.births:
                record = birth.record
                if record in keep or last_use.get(record, 0) > op.order:
                    built[record] = outputs[birth.position].untyped_storage()
            del outputs
            for view in op.reads:
                if last_use[view.record] == op.order and view.record not in keep:
                    built.pop(view.record, None)
    return built


def _call(op: RecordedOp, there: Leaves, built: dict[StorageRecord, torch.UntypedStorage]) -> list[Any]:
    arguments = [
        _tensor(argument, op, there, built) if type(argument) is View or type(argument) is Scratch else argument
        for argument in op.arguments
    ]
    if op.generator is None or op.state is None:
        if type(op.spec) is Flat and not op.spec.names:
            return outputs_of(op.func(*arguments))
        args, kwargs = unflatten(arguments, op.spec)
        return outputs_of(op.func(*args, **kwargs))
    args, kwargs = unflatten(arguments, op.spec)
    now = state_of(op.generator)
    set_state_of(op.generator, op.state)
    try:
        return outputs_of(op.func(*args, **kwargs))
    finally:
        set_state_of(op.generator, now)


def _tensor(
    argument: View | Scratch, op: RecordedOp, there: Leaves, built: dict[StorageRecord, torch.UntypedStorage]
) -> torch.Tensor:
    if isinstance(argument, Scratch):
        return torch.ones(argument.shape, dtype=argument.dtype, device=argument.device)
    # The op only writes the replay's own storages, never a saved value.
    owned = argument.record in op.writes
    storage = None if owned else there.get((argument.record, argument.generation))
    return argument.geometry.on(built[argument.record] if storage is None else storage)


def parts_read(ops: list[RecordedOp], there: Leaves) -> Parts:
    """The bytes that the ops see of each earlier storage, in pieces that do not overlap."""
    storages: dict[StorageRecord, torch.UntypedStorage] = {}
    extents: dict[StorageRecord, set[tuple[int, int]]] = {}
    for op in ops:
        for view in op.reads:
            # A part of a storage that the step has not made (or has made where recording could not see it).
            was_there = view.record.birth is None and (view.record, view.generation) in there
            if was_there and view.record not in op.writes:
                storages[view.record] = there[view.record, view.generation]
                extents.setdefault(view.record, set()).add(_extent(view.geometry))
    wholes = {record: bytes_of(storage) for record, storage in storages.items()}
    return [
        (record, wholes[record][begin:end])
        for record, pieces in extents.items()
        for begin, end in _merged(sorted(pieces))
    ]


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, each once."""
    merged: list[tuple[int, int]] = []
    for begin, end in pieces:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _extent(geometry: Geometry) -> tuple[int, int]:
    """First byte on the storage, and the byte after the last."""
    count = 0
    if 0 not in geometry.shape:
        count = 1 + sum((size - 1) * stride for size, stride in zip(geometry.shape, geometry.stride, strict=True))
    return geometry.offset * geometry.dtype.itemsize, (geometry.offset + count) * geometry.dtype.itemsize


def state_of(generator: Generator) -> bytearray:
    """The generator's state, copied into Python's memory, because no budget has room for it: each random op on a tape
    has one, of 5056 bytes for the CPU's generator.
    """
    with aside():
        state = generator.get_state()
        return bytearray(ctypes.string_at(state.data_ptr(), state.nbytes))  # not an op, which modes would see


def set_state_of(generator: Generator, state: bytearray) -> None:
    """Puts the generator into the state; takes no memory of the device."""
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
