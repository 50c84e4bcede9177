"""The tape: what ran in the recorded stretches of forward, as references that hold no memory.

A :class:`StorageRecord` stands for one storage. An op's tensor arguments become :class:`View`s on such records, so that
a tape keeps nothing alive; what a replay needs to stay is held by its recipe (``closure.py``). Saved values and recipes
are known here by what is asked of them alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from poochplan.tensors.arguments import Layout, flatten
from poochplan.tensors.storages import Geometry, is_plain
from poochplan.tensors.torch_private import storage_identity, version_of

OFF = 0
"""Stands for the number of a window where nothing is recorded."""


class Content(Protocol):
    """A saved value, as far as a tape knows it."""

    record: StorageRecord
    generation: int

    @property
    def unwritten(self) -> bool:
        """Whether nobody has written it since it was saved."""

    @property
    def waits_for_replay(self) -> bool:
        """Whether only a replay brings it back."""

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """A replay has rebuilt it, in ``storage``."""


class Claim(Protocol):
    """A recipe, as far as a tape knows it."""

    def refresh_if_possible(self) -> None:
        """A storage that it reads has become a saved value."""


# A tape makes several of these for each op. None is known to the garbage collector (``gc=False``), whose work on them
# would be longer than recording; ops and records refer to each other in circles, which the tape itself breaks.


class View(msgspec.Struct, gc=False, eq=False):
    """A tensor argument: where it lay, and which content it read."""

    record: StorageRecord
    generation: int
    """Recorded writes to the storage before it was read."""
    geometry: Geometry
    watch: tuple[torch.Tensor, int] | None
    """For a storage that cannot be rebuilt: a version probe, and the version that was read."""

    @property
    def still_there(self) -> bool:
        """Whether the storage still holds what was read, when it cannot be rebuilt."""
        return self.watch is None or version_of(self.watch[0]) == self.watch[1]


class Scratch(NamedTuple):
    """Stands for running statistics in training: a replay gives the op a throw-away tensor in their place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Birth(msgspec.Struct, gc=False, eq=False):
    """A storage that an op has borne, and the position of the tensor on it among the op's flat outputs."""

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
    spec: Layout
    grad_enabled: bool
    """Some kernels ask (oneDNN's LSTM returns its workspace only then)."""
    usable: bool = True
    """Whether it can be run again."""
    uninitialised: bool = False
    """Bears storages whose contents are undefined."""
    overwrites: StorageRecord | None = None
    """The storage whose every byte it writes without reading one."""
    births: tuple[Birth, ...] = ()
    writes: tuple[StorageRecord, ...] = ()
    """Storages that were there before and are written in place."""
    generator: torch.Generator | None = None
    state: bytearray | None = None
    """Generator state before the op, when it is random."""

    def allocate_only(self, output: torch.Tensor) -> None:
        """Turns an uninitialised allocation into one of the same geometry that reads no tensor (as ``empty_like``)."""
        options = {"dtype": output.dtype, "device": output.device}
        self.func = torch.ops.aten.empty_strided.default
        arguments, self.spec = flatten((list(output.shape), list(output.stride())), options)
        self.arguments, self.reads = tuple(arguments), ()


class StorageRecord(msgspec.Struct, gc=False, eq=False):
    """One storage, as far as recording has seen it.

    Contents are told apart by *generation*, the number of writes that recording knows of, not by torch's version
    counters: chunks of ``unsafe_split`` (GRU cells) have counters of their own on one storage. What was written where
    recording was off is one generation more, which nothing can rebuild.
    """

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    """What its version counter says if every write was recorded."""
    was_there: bool = False
    """Whether it is known to have lived before the step began."""
    birth: RecordedOp | None = None
    writes: tuple[RecordedOp | None, ...] = ()
    """What wrote it in place, in order: ``writes[k]`` made generation ``k + 1``; None where it was not recorded."""
    broken: bool = False
    """Whether one of the writes was not recorded or cannot be run again."""
    seen_in: int = OFF
    """The window of recording in which it was last met."""
    value: weakref.ref[Content] | None = None
    packed: bool = False
    """Whether it has had its save point."""
    waiting: tuple[weakref.ref[Claim], ...] = ()
    """Recipes that read this storage before it was packed: they claim its value when it comes."""

    def meet(self, version: int, window: int) -> None:
        """It is read or packed, in that window of recording (or ``OFF``), through a tensor of that version.

        A counter that is ahead tells of a write that was not recorded. One that is behind is a chunk's own: it says
        nothing, and between windows that is taken for a write, until the save point; from there on the plan answers
        for it, since what is written after its save is never planned to be read by a replay.
        """
        unbroken = self.packed or (window != OFF and window == self.seen_in)
        if version > self.version or (version < self.version and not unbroken):
            self.writes = (*self.writes, None)
            self.broken = True
            self.version = version
        self.seen_in = window

    def was_written_by(self, op: RecordedOp) -> None:
        """A recorded op has written it in place."""
        self.writes = (*self.writes, op)
        self.broken |= not op.usable
        self.version += 1

    def attach(self, value: Content) -> None:
        """The storage has become a saved value: recipes that read it claim the value instead of what they held."""
        self.value = weakref.ref(value)
        waiting, self.waiting = self.waiting, ()
        for reference in waiting:
            recipe = reference()
            if recipe is not None:
                recipe.refresh_if_possible()

    def wait_for_value(self, recipe: Claim) -> None:
        """Has the recipe refreshed when this storage is packed."""
        if all(reference() is not recipe for reference in self.waiting):
            self.waiting = (*self.waiting, weakref.ref(recipe))

    def value_at(self, generation: int) -> Content | None:
        """The saved value of this storage, when it is still there and holds just this content."""
        value = self.value() if self.value is not None else None
        return value if value is not None and value.generation == generation and value.unwritten else None

    def writers_up_to(self, generation: int) -> list[RecordedOp] | None:
        """The ops that make this content from nothing; None when one of them was not recorded or cannot be run again.

        A storage born uninitialised counts only if the first write was seen and covers it: what is written past the
        dispatcher before is then overwritten.
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
        """Whether its birth and every write since were recorded, as ops that can be run again."""
        return self.birth is not None and self.birth.usable and not self.broken

    def _overwritten(self, generation: int) -> bool:
        first = self.writes[0] if generation >= 1 else None
        return first is not None and first.overwrites is self


class Tape:
    """What ran in a step. State: the registry of storages, the number of ops, and the window they are seen in.

    The registry is by identity, which another storage has once the first is gone: a record is a storage's only as long
    as its weak reference says so.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.static: set[int] = set()
        """Storage keys of parameters and buffers, in this step."""
        self.window = OFF
        """The stretch that is being recorded, or was last; stretches count from 1."""
        self._registry: dict[int, StorageRecord] = {}
        self._earlier: dict[int, StorageRecord] = {}
        """Storages that were there before the step, as far as it knows: met in an earlier one, or given to this one."""
        self._recorded: list[StorageRecord] = []
        self._kept: list[tuple[Callable[[], bool], list[StorageRecord]]] = []
        """Recorded in earlier steps whose handles may still be replayed from it."""
        self._count = 0

    def __del__(self) -> None:
        for records in (self._recorded, *(records for _, records in self._kept)):
            _break_circles(records)

    def forget(self, is_held: Callable[[], bool] = lambda: False) -> None:
        """Begins with no records. All that was recorded goes, as soon as ``is_held`` says that no handle of it is left.

        Records and ops refer to each other, and nobody else would find out that they are garbage.
        """
        self._earlier, self._registry = self._registry, {}
        self._kept.append((is_held, self._recorded))
        self._recorded = []
        kept = []
        for held, records in self._kept:
            if held():
                kept.append((held, records))
            else:
                _break_circles(records)
        self._kept = kept

    def __len__(self) -> int:
        """How many storages of this step are alive."""
        return sum(record.storage() is not None for record in self._registry.values())

    def is_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The step, which has just begun, is handed these: what is a part of something larger was there before it."""
        for tensor in tensors:
            if is_plain(tensor, self.device_type) and tensor.nbytes < tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                record = StorageRecord(weakref.ref(storage), version_of(tensor))
                self._earlier[storage_identity(storage)] = record

    def earlier_values(self) -> Iterator[Content]:
        """Saved values of earlier steps that are still alive."""
        for record in self._earlier.values():
            value = record.value() if record.value is not None else None
            if value is not None:
                yield value

    def known(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of the tensor's storage, if there is one."""
        storage = tensor.untyped_storage()
        record = self._registry.get(storage_identity(storage))
        return record if record is not None and record.storage() is storage else None

    def record_of(self, tensor: torch.Tensor) -> StorageRecord:
        """The record of the tensor's storage, made when it is new."""
        return self.known(tensor) or self._new(tensor, tensor.untyped_storage())

    def _new(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> StorageRecord:
        key = storage_identity(storage)
        before = self._earlier.get(key)
        was_there = before is not None and before.storage() is storage
        record = self._registry[key] = StorageRecord(weakref.ref(storage), version_of(tensor), was_there)
        return record

    def met(self, tensor: torch.Tensor, storage: torch.UntypedStorage, window: int) -> StorageRecord:
        """The record of a tensor that is read or packed in that window; what was written unrecorded shows here."""
        record = self._registry.get(storage_identity(storage))
        if record is None or record.storage() is not storage:
            record = self._new(tensor, storage)
        record.meet(version_of(tensor), window)
        return record

    def next_op(
        self, func: Any, arguments: tuple[Any, ...], reads: tuple[View, ...], spec: Layout, *, usable: bool
    ) -> RecordedOp:
        """An op that is about to run, the next in order."""
        self._count += 1
        return RecordedOp(self._count, func, arguments, reads, spec, torch.is_grad_enabled(), usable)

    def was_born(self, op: RecordedOp, position: int, output: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """The op has given its output at ``position``: with a storage that is not known it has borne that."""
        key = storage_identity(storage)
        record = self._registry.get(key)
        if record is not None and record.storage() is storage:
            return
        record = StorageRecord(weakref.ref(storage), version_of(output), birth=op, seen_in=self.window)
        self._registry[key] = record
        self._recorded.append(record)
        op.births = (*op.births, Birth(position, record))

    def were_written(self, op: RecordedOp, records: list[StorageRecord]) -> None:
        """The op has written these in place."""
        op.writes = tuple(dict.fromkeys(records))
        for record in op.writes:
            record.was_written_by(op)
            self._recorded.append(record)


def _break_circles(records: list[StorageRecord]) -> None:
    for record in records:
        record.birth = None
        record.writes = ()
