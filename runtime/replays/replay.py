"""Replay: bringing a recomputed value back by running its recorded writers again, bitwise.

``docs/semantics.md`` says which ops run and what is freed when; the simulator follows the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from poochplan.tensors.arguments import Flat, outputs_of, unflatten
from poochplan.torch_private.tensor_internals import outside_transforms

from .closure import NotReplayable, closure_of, storage_of
from .recorded import Content, RecordedOp, Scratch, StorageRecord, View, set_state_of, state_of

Leaves = dict[tuple[StorageRecord, int], torch.UntypedStorage]
"""What a replay starts from: the storage of each content that it does not build."""
Run = Callable[[list[RecordedOp], Leaves, set[StorageRecord], str], dict[StorageRecord, torch.UntypedStorage]]
"""Like :func:`run_ops`."""


def replay(
    value: Content, resident: Callable[[Content], torch.UntypedStorage], device_type: str, run: Run
) -> list[Content]:
    """Brings ``value``, and every saved value on the way that waits for a replay, back onto the device.

    ``resident(other)`` gives the storage of a saved value that is not waiting for a replay, waiting for its copy;
    ``run`` is :func:`run_ops`, or calls it.
    Returns the saved values that came back. Raises ``RuntimeError`` as autograd would when an input was written in
    place after it was read.
    """
    try:
        closure = closure_of(value.record, value.generation, follow_recipes=True)
        there = {
            need: storage_of(need[0]) if source is None else resident(source) for need, source in closure.leaves.items()
        }
    except NotReplayable as reason:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is to be recomputed, and {reason}"
        ) from None
    targets = [(value.record, value), *closure.targets]
    built = run(closure.in_order(), there, {record for record, _ in targets}, device_type)
    for record, target in targets:
        target.came_back(built[record])
    return [target for _, target in targets]


def run_ops(
    ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
) -> dict[StorageRecord, torch.UntypedStorage]:
    """Runs the ops in order; returns the storages of the records in ``keep``. Temporaries go after their last use."""
    last_use = {view.record: op.order for op in ops for view in op.reads}
    built: dict[StorageRecord, torch.UntypedStorage] = {}
    with outside_transforms(), contextlib.ExitStack() as stack:  # no graph comes of it: what goes in is detached
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        with_gradients = torch.is_grad_enabled()
        for op in ops:
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
    # What the op writes is the replay's own, never a saved value.
    owned = argument.record in op.writes
    storage = None if owned else there.get((argument.record, argument.generation))
    return argument.geometry.on(built[argument.record] if storage is None else storage)
