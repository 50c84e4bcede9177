"""Replay: bringing a recomputed value back by running its recorded writers again, bitwise.

``docs/semantics.md`` says which ops run and what is freed when; the simulator follows the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from poochplan.tensors.arguments import outputs_of, unflatten

from .recorder import RecordedOp, Scratch, StorageRecord, View

if TYPE_CHECKING:
    from poochplan.runtime.engine.saved_value import SavedValue


Leaves = dict[tuple["StorageRecord", int], torch.UntypedStorage]
"""What a replay starts from: the storage of each content that it does not build."""

WRITTEN_SINCE = "an input of the replay was written in place since it was read"


class NotReplayable(Exception):  # noqa: N818 - a verdict, caught where the recipe is made
    """A writer was not recorded, is opaque, or an input is gone; the value is swapped instead.

    ``record``: the input that it is about, where it is about one.
    """

    def __init__(self, reason: str, record: StorageRecord | None = None) -> None:
        super().__init__(reason)
        self.record = record


class Closure:
    """All that a need comes to: the ops to run, the contents they start from, and the values they bring back."""

    def __init__(self) -> None:
        self.ops: dict[int, RecordedOp] = {}
        self.leaves: dict[tuple[StorageRecord, int], SavedValue | None] = {}
        """Contents that are there already: saved values, or (None) what recording found in place."""
        self.rebuilt: dict[StorageRecord, None] = {}
        self.targets: list[tuple[StorageRecord, SavedValue]] = []
        """Saved values that wait for a replay themselves and are brought back along the way."""

    def in_order(self) -> list[RecordedOp]:
        return [self.ops[order] for order in sorted(self.ops)]


def closure_of(root: StorageRecord, generation: int, *, follow_recipes: bool) -> Closure:
    """Follows ``need(root, generation)`` of ``docs/semantics.md`` to its end.

    With ``follow_recipes`` a saved input that waits for a replay is brought back too; without, it is a leaf.

    Raises ``NotReplayable`` when a writer of the root is missing or opaque, or an op on the way writes something
    that the replay does not own.
    """
    closure = Closure()
    pending, seen = [(root, generation)], set()
    while pending:
        need = record, wanted = pending.pop()
        if need in seen:
            continue
        seen.add(need)
        value = record.value_at(wanted) if record is not root else None
        writers = record.writers_up_to(wanted)
        if value is not None and not (follow_recipes and value.waits_for_replay):
            closure.leaves[need] = value
            continue
        if value is not None:
            closure.targets.append((record, value))
        if writers is None:
            if record is root or value is not None:
                raise NotReplayable("a writer of the value was not recorded or cannot be run again")
            if wanted != len(record.writes):
                raise NotReplayable(WRITTEN_SINCE, record)
            closure.leaves[need] = None
            continue
        closure.rebuilt[record] = None
        for op in writers:
            closure.ops[op.order] = op
            # Of the storage itself an op reads what the writers before it left: they run anyway.
            pending += [(view.record, view.generation) for view in op.views() if view.record is not record]
    if any(written not in closure.rebuilt for op in closure.ops.values() for written in op.writes):
        raise NotReplayable("an op of the replay writes into something it does not own")
    for op in closure.ops.values():
        for view in op.views():
            if not view.still_there:
                raise NotReplayable(WRITTEN_SINCE, view.record)
    return closure


class Recipe:
    """What the replay of one value needs to stay, held from its save point until it is back.

    ``values`` are saved values it reads (on the device, on the host, or recipes of their own); ``storages`` what was
    there before recording began: parameters, buffers, inputs.
    """

    __slots__ = ("__weakref__", "generation", "record", "storages", "values")

    def __init__(self, record: StorageRecord, generation: int) -> None:
        self.record = record
        self.generation = generation
        self.values: list[SavedValue] = []
        self.storages: list[torch.UntypedStorage] = []
        self.refresh()

    def refresh_if_possible(self) -> None:
        """Like :meth:`refresh`; when something it reads was written meanwhile it keeps what it holds, and the replay
        will say so.
        """
        with contextlib.suppress(NotReplayable):
            self.refresh()

    def refresh(self) -> None:
        """Works out anew what has to stay; called again when a storage on the way has become a saved value."""
        closure = closure_of(self.record, self.generation, follow_recipes=False)
        values, storages = [], []
        for (record, _), value in closure.leaves.items():
            if value is not None:
                values.append(value)
            else:
                storages.append(_storage_of(record))
                record.wait_for_value(self)
        for record in closure.rebuilt:
            if record is not self.record:
                record.wait_for_value(self)
        self.values, self.storages = values, storages


def _storage_of(record: StorageRecord) -> torch.UntypedStorage:
    storage = record.storage()
    if storage is None:
        raise NotReplayable("an input of the replay is gone")
    return storage


def replay(
    value: SavedValue,
    resident: Callable[[SavedValue], torch.UntypedStorage],
    run: Callable[[list[RecordedOp], Leaves, set[StorageRecord], str], dict[StorageRecord, torch.UntypedStorage]],
) -> list[SavedValue]:
    """Brings ``value``, and every saved value on the way that waits for a replay, back onto the device.

    ``resident(other)`` gives the storage of a saved value that is not waiting for a replay, waiting for its copy;
    ``run`` is :func:`run_ops`, or calls it.
    Returns the saved values that came back. Raises ``RuntimeError`` as autograd would when an input was written in
    place after it was read.
    """
    try:
        closure = closure_of(value.record, value.generation, follow_recipes=True)
        there = {
            need: _storage_of(need[0]) if source is None else resident(source)
            for need, source in closure.leaves.items()
        }
    except NotReplayable as reason:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is to be recomputed, and {reason}"
        ) from None
    targets = [(value.record, value), *closure.targets]
    built = run(closure.in_order(), there, {record for record, _ in targets}, value.device_type)
    for record, target in targets:
        target.came_back(built[record])
    return [target for _, target in targets]


def run_ops(
    ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
) -> dict[StorageRecord, torch.UntypedStorage]:
    """Runs the ops in order; returns the storages of the records in ``keep``. Temporaries go after their last use."""
    last_use: dict[StorageRecord, int] = {}
    for op in ops:
        for view in op.views():
            last_use[view.record] = op.order
    built: dict[StorageRecord, torch.UntypedStorage] = {}
    # No graph comes of it: what goes in is detached.
    with torch.autocast(device_type, enabled=False):
        for op in ops:
            with torch.set_grad_enabled(op.grad_enabled):
                outputs = _call(op, there, built)
            for position, record in op.births:
                if record in keep or last_use.get(record, 0) > op.order:
                    built[record] = outputs[position].untyped_storage()
            del outputs
            for record in {view.record for view in op.views()}:
                if last_use[record] == op.order and record not in keep:
                    built.pop(record, None)
    return built


def _call(op: RecordedOp, there: Leaves, built: dict[StorageRecord, torch.UntypedStorage]) -> list[Any]:
    def restore(argument: Any) -> Any:
        if isinstance(argument, View):
            # What the op writes is the replay's own, never a saved value.
            owned = argument.record in op.writes
            storage = None if owned else there.get((argument.record, argument.generation))
            return argument.geometry.on(built[argument.record] if storage is None else storage)
        if isinstance(argument, Scratch):
            return torch.ones(argument.shape, dtype=argument.dtype, device=argument.device)
        return argument

    args, kwargs = unflatten([restore(argument) for argument in op.arguments], op.spec)
    if op.generator is None or op.state is None:
        return outputs_of(op.func(*args, **kwargs))
    now = op.generator.get_state()
    op.generator.set_state(op.state)
    try:
        return outputs_of(op.func(*args, **kwargs))
    finally:
        op.generator.set_state(now)
