"""Replay: brings a recomputed value back by running its recorded writers again, bitwise equal.

A :class:`StorageRecord` stands for one storage as recording sees it. The ops that created, read and wrote it refer to
it by views, so that a tape keeps nothing alive. The closure of a value gives the recorded ops that run, the
contents from which they start, and what must stay until then; its recipe holds that.

``docs/semantics.md`` defines what a replay needs and what is freed when; planner and simulator follow the same rules.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch

from poochplan.guard import users
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import WIDENING, version_of

from .host_copies import HostCopy
from .running import Around, RecordedOp, parts_read, run_ops

OFF = 0
"""Stands for the number of a window when nothing is recorded."""


class Content(Protocol):
    """A saved value, as the tape sees it."""

    record: StorageRecord
    generation: int

    @property
    def unwritten(self) -> bool:
        """Whether it was not written since it was saved."""

    @property
    def waits_for_replay(self) -> bool:
        """Whether only a replay brings it back."""

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """A replay has rebuilt it, in ``storage``."""


class StorageRecord(msgspec.Struct, gc=False, eq=False):
    """One storage, as seen by recording.

    Contents are told apart by *generation*, the number of writes that recording knows, and not by torch's version
    counters: chunks of ``unsafe_split`` (GRU cells) have separate counters on one storage. A write while recording was
    off makes another generation, which nothing can rebuild.
    """

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    """Value of its version counter if every write was recorded (see :class:`CounterBefore`)."""
    was_there: bool = False
    """Whether it is known to be from before the step."""
    birth: RecordedOp | None = None
    writes: tuple[RecordedOp | None, ...] = ()
    """The in-place writes in order: ``writes[k]`` made generation ``k + 1``; None for an unrecorded one."""
    broken: bool = False
    """Whether one of the writes was not recorded or cannot be run again."""
    seen_in: int = OFF
    """The window of recording in which it was last seen."""
    value: weakref.ref[Content] | None = None
    packed: bool = False
    """Whether it has had its save point."""
    save_point: int | None = None
    """Its planned save point; None before it, and outside the plan."""
    kept: int = -1
    """The generation that recipes keep in place, because what it was made of is gone; -1 if there is none."""
    may_copy: bool = False
    """Whether a recipe that reads it makes a copy, because the step may still write it."""
    copies: dict[int, HostCopy] | None = None
    """By generation."""
    waiting: dict[int, weakref.ref[Recipe]] | None = None
    """Recipes that read this storage before it was packed: they claim its value once it is."""

    def meet(self, version: int, window: int) -> None:
        """It is read or packed, in that window of recording (or ``OFF``), through a tensor with that version.

        A counter that is ahead shows an unrecorded write. A counter that is behind is not the one by which the storage
        was seen before (it is a chunk's, or that of ``.data``). At zero nothing has ever written through it. If it is
        behind and not at zero it shows nothing. Between windows that counts as a write until the save point. After the
        save point the plan guarantees it: a planned replay never reads a content that was written after its save.
        """
        if version < self.version and not version:
            return
        unbroken = self.packed or (window != OFF and window == self.seen_in)
        if version > self.version or (version < self.version and not unbroken):
            self.was_written(None)
            self.version = version
        self.seen_in = window

    def was_written(self, op: RecordedOp | None) -> None:
        """A recorded op has written it in place; None: code that was not recorded has."""
        self.writes = (*self.writes, op)
        self.broken |= op is None or not op.usable

    @property
    def generation(self) -> int:
        """That of its present content."""
        return len(self.writes)

    @property
    def is_born(self) -> bool:
        """Whether the op that created it was recorded."""
        return self.birth is not None

    def attach(self, value: Content) -> None:
        """The storage has become a saved value: recipes that read it now claim the value instead of what they held."""
        self.value = weakref.ref(value)
        waiting, self.waiting = self.waiting, None
        for reference in waiting.values() if waiting is not None else ():
            recipe = reference()
            if recipe is not None:
                with contextlib.suppress(NotReplayable):  # the replay reports what was written
                    recipe.refresh()

    def keep_copy(self, generation: int) -> None:
        """Its present content stays available, as this generation."""
        storage = self.storage()
        if storage is not None and (self.copies is None or generation not in self.copies):
            self.copies = {**(self.copies or {}), generation: HostCopy(storage)}

    @property
    def is_awaited(self) -> bool:
        """Whether a recipe that is still needed reads it as it is now."""
        recipes = (reference() for reference in (self.waiting or {}).values())
        return any(recipe is not None for recipe in recipes)

    def wait_for_value(self, recipe: Recipe) -> None:
        """Has the recipe refreshed when this storage is packed."""
        if self.waiting is None:
            self.waiting = {}
        self.waiting[id(recipe)] = weakref.ref(recipe)

    def value_at(self, generation: int) -> Content | None:
        """The saved value of this storage, if it still exists and has exactly this content."""
        value = self.value() if self.value is not None else None
        return value if value is not None and value.generation == generation and value.unwritten else None

    def writers_up_to(self, generation: int) -> list[RecordedOp] | None:
        """The ops that make this content from nothing; None if one of them was not recorded or cannot be run again.

        A storage that was created uninitialised counts only if the first write was seen and covers it. Earlier writes
        past the dispatcher are then overwritten.
        """
        if self.birth is None or (self.birth.uninitialised and not self._overwritten(generation)):
            return None
        if not self.broken and self.birth.usable:
            return [self.birth, *self.writes[:generation]]  # type: ignore[list-item]  # none of them is missing
        writers = [self.birth]
        for writer in self.writes[:generation]:
            if writer is None:
                return None
            writers.append(writer)
        return writers if all(writer.usable for writer in writers) else None

    @property
    def is_known(self) -> bool:
        """Whether its creation and every write since were recorded, as ops that make its content from nothing."""
        if self.birth is None or not self.birth.usable or self.broken:
            return False
        return not self.birth.uninitialised or self._overwritten(len(self.writes))

    def _overwritten(self, generation: int) -> bool:
        first = self.writes[0] if generation >= 1 else None
        return first is not None and first.overwrites is self

    def source(self) -> Source | None:
        """What a recorded cast or clone has read to make it; None if that was written since, or is gone."""
        maker = self.birth
        if maker is None or self.writes or maker.func not in WIDENING or len(maker.reads) != 1:
            return None
        read = maker.reads[0]
        if read.source is None or read.record.storage() is None:
            return None
        is_unwritten = version_of(read.source[0]) == read.source[1] and len(read.record.writes) == read.generation
        return Source(read.record, read.generation, read.geometry, *read.source) if is_unwritten else None

    def made_again(self) -> torch.UntypedStorage:
        """A new storage, which its :meth:`source` gives once more."""
        source = self.source()
        assert source is not None
        assert self.birth is not None
        read = storage_of(source.record)
        there = {(source.record, source.generation): read}
        return run_ops([self.birth], there, {self}, read.device.type)[self]


class Source(NamedTuple):
    """What a recorded cast or clone has read to make a storage."""

    record: StorageRecord
    generation: int
    geometry: Geometry
    probe: torch.Tensor
    """Shows, with the version that was read, whether it was written since."""
    version: int


class CounterBefore(NamedTuple):
    """The version counter of a tensor that a recorded op is about to write.

    Torch moves a counter after the op has left the dispatcher, and only if the op was called above ``ADInplaceOrView``:
    a kernel's own ``copy_`` moves none, and inside a dispatch mode both look alike. So the counter itself is read when
    the next op or pack is seen. A write moves it at most once for each tensor: more shows another, unrecorded write.
    """

    record: StorageRecord
    probe: torch.Tensor
    version: int


# -- replays ---------------------------------------------------------------------------------------------------------

WRITTEN_SINCE = "an input of the replay was written in place since it was read"
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "it is to be recomputed, and {}"
)


class NotReplayable(Exception):  # noqa: N818 - a verdict, caught where the recipe is made
    """A writer was not recorded, is opaque, or an input is gone. The value is swapped instead; if that is found in
    backward, when the replay is to run, it is an error.

    ``record``: the input concerned, if there is one.
    """

    def __init__(self, reason: str, record: StorageRecord | None = None) -> None:
        super().__init__(reason)
        self.record = record


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


def storage_of(record: StorageRecord) -> torch.UntypedStorage:
    """The storage that a record stands for; raises ``NotReplayable`` when it is gone."""
    storage = record.storage()
    if storage is None:
        raise NotReplayable("a tensor that it needs is gone")
    return storage


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
