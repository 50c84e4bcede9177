"""Replay: brings a recomputed value back by running its recorded writers again, bitwise equal.

The closure of a value gives the recorded ops that run, the contents from which they start, and what must stay until
then; its recipe holds that.

``docs/semantics.md`` defines what a replay needs and what is freed when; planner and simulator follow the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec
import torch

from poochplan.guard import users
from poochplan.torch_private.tensor_internals import version_of

from .replay import Around, Content, NotReplayable, RecordedOp, StorageRecord, parts_read, run_ops, storage_of

WRITTEN_SINCE = "an input of the replay was written in place since it was read"
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "it is to be recomputed, and {}"
)


class Closure:
    """What a need requires: the ops to run, the contents from which they start, and the values that they bring back."""

    def __init__(self) -> None:
        self.ops: dict[int, RecordedOp] = {}
        self.leaves: dict[tuple[StorageRecord, int], Content | None] = {}
        """Contents that exist already: saved values, or (None) storages found in place."""
        self.copied = set[tuple[StorageRecord, int]]()
        """Leaves that were written since, and of which there is a copy."""
        self.rebuilt: dict[StorageRecord, None] = {}
        self.targets: list[tuple[StorageRecord, Content]] = []
        """Saved values that wait for a replay themselves and are brought back along the way."""

    def takes_copy(self, record: StorageRecord, generation: int) -> None:
        """The leaf was written since it was read; raises ``NotReplayable`` if there is no copy of what was read."""
        if record.copies is None or generation not in record.copies:
            raise NotReplayable(WRITTEN_SINCE, record)
        self.copied.add((record, generation))


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
        is_kept = record.kept == wanted and value is None and record is not root
        writers = None if is_kept else record.writers_up_to(wanted)
        if writers is None:
            if record is root or value is not None:
                raise NotReplayable("an op that made it was not recorded, or cannot be run again")
            if wanted != len(record.writes):
                closure.takes_copy(record, wanted)
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
                raise NotReplayable("running it again would overwrite another tensor")
    for op in ops:
        for view in op.reads:
            # The earlier contents of a storage that a writer fills are no input.
            if view.probe is None or (view.record, view.generation) not in leaves:
                continue
            if version_of(view.probe[0]) != view.probe[1]:
                closure.takes_copy(view.record, view.generation)


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

    def refresh(self) -> None:
        """Determines again what must stay. Called again when a storage on the way has become a saved value."""
        closure = closure_of(self.record, self.generation, follow_recipes=False)
        while self._keeps_instead(closure):
            closure = closure_of(self.record, self.generation, follow_recipes=False)
        values, storages = [], []
        for (record, generation), value in closure.leaves.items():
            if value is not None:
                values.append(value)
                continue
            storages.append(storage_of(record))
            record.wait_for_value(self)
            if record.may_copy:
                record.keep_copy(generation)
        for record in closure.rebuilt:
            if record is not self.record:
                record.wait_for_value(self)
        self.values, self.storages = tuple(values), tuple(storages)

    def _keeps_instead(self, closure: Closure) -> bool:
        """Whether what was made of inputs that are gone is from now on kept in their place, because it is still there.

        A window of recording may begin behind the ops that made such an input. The plan needs none of them: it replays
        from a value that is saved, but whose save point comes later.
        """
        gone = {record for (record, _), value in closure.leaves.items() if value is None and record.storage() is None}
        if not gone:
            return False
        of_op = ((op, record) for record in closure.rebuilt for op in (record.birth, *record.writes) if op is not None)
        is_new = False
        for op, record in sorted(of_op, key=lambda made: made[0].order):
            if (
                record is self.record
                or op.order not in closure.ops
                or not any(view.record in gone for view in op.reads)
            ):
                continue
            if record.storage() is None:
                gone.add(record)
            elif record.kept != len(record.writes):
                record.kept, is_new = len(record.writes), True
        return is_new


def _in_place(need: tuple[StorageRecord, int], closure: Closure, *, from_copies: bool) -> torch.UntypedStorage:
    record, generation = need
    if need in closure.copied:
        if not from_copies or record.copies is None:
            raise NotReplayable(WRITTEN_SINCE, record)
        return record.copies[generation].storage()
    storage = storage_of(record)
    if not storage.nbytes():
        raise NotReplayable("a sharded weight that it needs is not gathered")
    return storage


def replay(
    value: Content,
    resident: Callable[[Content], torch.UntypedStorage],
    device_type: str,
    around: Around | None = None,
) -> list[Content]:
    """Brings ``value``, and every saved value on the way that waits for a replay, back onto the device.

    ``resident(other)`` gives the storage of a saved value that is not waiting for a replay, waiting for its copy.
    ``around``, for verification, gets what the ops read in place, and returns a block in which they run; what was
    written since then does not come from a copy. Returns the saved values that came back. Raises ``RuntimeError`` as
    autograd would when an input was written in place after it was read.
    """
    try:
        closure = closure_of(value.record, value.generation, follow_recipes=True)
        there = {
            need: _in_place(need, closure, from_copies=around is None) if source is None else resident(source)
            for need, source in closure.leaves.items()
        }
    except NotReplayable as reason:
        raise users(RuntimeError(MODIFIED.format(reason))) from None
    targets = [(value.record, value), *closure.targets]
    ops = [closure.ops[order] for order in sorted(closure.ops)]
    with contextlib.nullcontext() if around is None else around(parts_read(ops, there)):
        built = run_ops(ops, there, {record for record, _ in targets}, device_type)
    for record, target in targets:
        target.came_back(built[record])
    return [target for _, target in targets]
