"""Running recorded ops again, from given contents: under their grad mode, generator states and switches."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from poochplan.runtime.devices.backend import Generator
from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.operators import Flat, outputs_of, unflatten
from poochplan.torch_private.switches import SwitchesAsRecorded
from poochplan.torch_private.tensor_internals import outside_transforms

from .replay import Leaves, RecordedOp, Scratch, StorageRecord, View


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
