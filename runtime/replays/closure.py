"""The closure of a replay: which recorded ops it runs, from which contents, and what has to stay until then.

``docs/semantics.md`` says what a replay needs; the planner follows the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import torch

from .recorded import Content, RecordedOp, StorageRecord

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
        self.leaves: dict[tuple[StorageRecord, int], Content | None] = {}
        """Contents that are there already: saved values, or (None) what recording found in place."""
        self.rebuilt: dict[StorageRecord, None] = {}
        self.targets: list[tuple[StorageRecord, Content]] = []
        """Saved values that wait for a replay themselves and are brought back along the way."""

    def in_order(self) -> list[RecordedOp]:
        """The ops as they ran."""
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
                # Of the storage itself an op reads what the writers before it left: they run anyway.
                if view.record is not record:
                    pending.append((view.record, view.generation))
    _check(closure)
    return closure


def _check(closure: Closure) -> None:
    """Raises ``NotReplayable`` when an op writes what the replay does not own, or an input is not what it was."""
    ops, rebuilt, leaves = closure.ops.values(), closure.rebuilt, closure.leaves
    for op in ops:
        for written in op.writes:
            if written not in rebuilt:
                raise NotReplayable("an op of the replay writes into something it does not own")
    for op in ops:
        for view in op.reads:
            # What a writer finds of the storage that it fills is no input.
            if view.watch is not None and (view.record, view.generation) in leaves and not view.still_there:
                raise NotReplayable(WRITTEN_SINCE, view.record)


class Recipe(msgspec.Struct, eq=False, weakref=True):
    """What the replay of one value needs to stay, held from its save point until it is back.

    ``values`` are saved values it reads (on the device, on the host, or recipes of their own); ``storages`` what was
    there before recording began: parameters, buffers, inputs.
    """

    record: StorageRecord
    generation: int
    values: Sequence[Content] = ()
    storages: Sequence[torch.UntypedStorage] = ()

    def __post_init__(self) -> None:
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
