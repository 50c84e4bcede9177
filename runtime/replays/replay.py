"""Replay: brings a recomputed value back by running its recorded writers again, bitwise equal. Its closure gives the
recorded ops that run, the contents from which they start, and what must stay until then.

``docs/semantics.md`` defines what a replay needs and what is freed when; planner and simulator follow the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from poochplan.tensors.operators import Flat, outputs_of, unflatten
from poochplan.torch_private.tensor_internals import outside_transforms

from .recorded import Content, RecordedOp, Scratch, StorageRecord, View, set_state_of, state_of

WRITTEN_SINCE = "an input of the replay was written in place since it was read"
Leaves = dict[tuple[StorageRecord, int], torch.UntypedStorage]
"""The starting points of a replay: the storage of each content that it does not build."""
Run = Callable[[list[RecordedOp], Leaves, set[StorageRecord], str], dict[StorageRecord, torch.UntypedStorage]]
"""Like :func:`run_ops`."""


class NotReplayable(Exception):  # noqa: N818 - a verdict, caught where the recipe is made
    """A writer was not recorded, is opaque, or an input is gone; the value is swapped instead.

    ``record``: the input concerned, if there is one.
    """

    def __init__(self, reason: str, record: StorageRecord | None = None) -> None:
        super().__init__(reason)
        self.record = record


class Closure:
    """Everything that a need requires: the ops to run, the contents from which they start, and the values that they
    bring back.
    """

    def __init__(self) -> None:
        self.ops: dict[int, RecordedOp] = {}
        self.leaves: dict[tuple[StorageRecord, int], Content | None] = {}
        """Contents that exist already: saved values, or (None) storages found in place."""
        self.rebuilt: dict[StorageRecord, None] = {}
        self.targets: list[tuple[StorageRecord, Content]] = []
        """Saved values that wait for a replay themselves and are brought back along the way."""

    def in_order(self) -> list[RecordedOp]:
        """The ops in the order in which they ran."""
        return [self.ops[order] for order in sorted(self.ops)]


def closure_of(root: StorageRecord, generation: int, *, follow_recipes: bool) -> Closure:
    """Follows ``need(root, generation)`` of ``docs/semantics.md`` to its end.

    With ``follow_recipes`` a saved input that waits for a replay is brought back too; without, it is a leaf.

    Raises ``NotReplayable`` when a writer of the root is missing or opaque, or an op on the way writes something
    that the replay does not own.
    """
    closure = Closure()
    ops = closure.ops
    pending, seen = [(root, generation)], set()
    while pending:
        need = record, wanted = pending.pop()
        if need in seen:
            continue
        seen.add(need)
        value = record.value_at(wanted) if record is not root else None
        if value is not None:
            if not (follow_recipes and value.waits_for_replay):
                closure.leaves[need] = value
                continue
            closure.targets.append((record, value))
        writers = record.writers_up_to(wanted)
        if writers is None:
            if record is root or value is not None:
                raise NotReplayable("a writer of the value was not recorded or cannot be run again")
            if wanted != len(record.writes):
                raise NotReplayable(WRITTEN_SINCE, record)
            closure.leaves[need] = None
            continue
        closure.rebuilt[record] = None
        for op in writers:
            ops[op.order] = op
            for view in op.reads:
                # An op reads from its own storage what earlier writers left: they run anyway.
                if view.record is not record:
                    pending.append((view.record, view.generation))
    _check(closure)
    return closure


def _check(closure: Closure) -> None:
    """Raises ``NotReplayable`` if an op writes a storage that the replay does not own, or an input has changed."""
    ops, rebuilt, leaves = closure.ops.values(), closure.rebuilt, closure.leaves
    for op in ops:
        for written in op.writes:
            if written not in rebuilt:
                raise NotReplayable("an op of the replay writes into something it does not own")
    for op in ops:
        for view in op.reads:
            # The earlier contents of a storage that a writer fills are no input.
            if view.watch is not None and (view.record, view.generation) in leaves and not view.still_there:
                raise NotReplayable(WRITTEN_SINCE, view.record)


class Recipe(msgspec.Struct, eq=False, weakref=True):
    """Everything that the replay of one value needs to stay, held from its save point until the value is back.

    ``values`` are saved values that it reads (on the device, on the host, or with recipes of their own). ``storages``
    existed before recording began: parameters, buffers, inputs.
    """

    record: StorageRecord
    generation: int
    values: Sequence[Content] = ()
    storages: Sequence[torch.UntypedStorage] = ()

    def __post_init__(self) -> None:
        self.refresh()

    def refresh_if_possible(self) -> None:
        """Like :meth:`refresh`. If a storage that it reads was written meanwhile, it keeps what it holds, and the
        replay will report that.
        """
        with contextlib.suppress(NotReplayable):
            self.refresh()

    def refresh(self) -> None:
        """Determines again what must stay. Called again when a storage on the way has become a saved value."""
        closure = closure_of(self.record, self.generation, follow_recipes=False)
        values, storages = [], []
        for (record, _), value in closure.leaves.items():
            if value is not None:
                values.append(value)
            else:
                storages.append(storage_of(record))
                record.wait_for_value(self)
        for record in closure.rebuilt:
            if record is not self.record:
                record.wait_for_value(self)
        self.values, self.storages = tuple(values), tuple(storages)


def storage_of(record: StorageRecord) -> torch.UntypedStorage:
    """The storage that a record stands for; raises ``NotReplayable`` when it is gone."""
    storage = record.storage()
    if storage is None:
        raise NotReplayable("an input of the replay is gone")
    return storage


def _with_memory(record: StorageRecord) -> torch.UntypedStorage:
    storage = storage_of(record)
    if not storage.nbytes():
        raise NotReplayable("a weight that the replay reads is not gathered now")
    return storage


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
            need: _with_memory(need[0]) if source is None else resident(source)
            for need, source in closure.leaves.items()
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
    """Runs the ops in order and returns the storages of the records in ``keep``. Temporaries are freed after their last
    use.
    """
    last_use = {view.record: op.order for op in ops for view in op.reads}
    built: dict[StorageRecord, torch.UntypedStorage] = {}
    with outside_transforms(), contextlib.ExitStack() as stack:  # it makes no graph, because its inputs are detached
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
    # The op only writes the replay's own storages, never a saved value.
    owned = argument.record in op.writes
    storage = None if owned else there.get((argument.record, argument.generation))
    return argument.geometry.on(built[argument.record] if storage is None else storage)
