"""The tape: what ran in the recorded stretches of forward, as references that hold no memory (``recorded.py``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from poochplan.tensors.arguments import Layout
from poochplan.tensors.storages import is_plain
from poochplan.torch_private.tensor_internals import storage_identity, version_of

from .recorded import OFF, Birth, Content, CounterBefore, RecordedOp, StorageRecord, View


class Tape:
    """What ran in a step. State: the registry of storages, the number of ops, and the window they are seen in.

    The registry is by identity, which another storage has once the first is gone: a record is a storage's only as long
    as its weak reference says so.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.static: dict[int, int] = {}
        """Storage keys of parameters and buffers, in this step, and what their version counters said at its begin."""
        self.window = OFF
        """The stretch that is being recorded, or was last; stretches count from 1."""
        self._registry: dict[int, StorageRecord] = {}
        self._earlier: dict[int, StorageRecord] = {}
        """Storages that were there before the step, as far as it knows: met in an earlier one, or given to this one."""
        self._recorded: list[StorageRecord] = []
        self._kept: list[tuple[Callable[[], bool], list[StorageRecord]]] = []
        """Recorded in earlier steps whose handles may still be replayed from it."""
        self._count = 0
        self._unsettled: list[CounterBefore] = []
        """Of the last write, until torch has moved its counters."""

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

    def has_met(self, storage: torch.UntypedStorage) -> bool:
        """Whether the step has saved a tensor that lies there, or a recorded op has read one."""
        record = self._registry.get(storage_identity(storage))
        return record is not None and record.storage() is storage

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
        version = self.static.get(key)  # the tensor may be one of `.data`, which has a counter of its own
        if version is None:
            version = version_of(tensor)
        record = self._registry[key] = StorageRecord(weakref.ref(storage), version, was_there)
        return record

    def met(self, tensor: torch.Tensor, storage: torch.UntypedStorage, window: int) -> StorageRecord:
        """The record of a tensor that is read or packed in that window; what was written unrecorded shows here."""
        if self._unsettled:
            self.settle()
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

    def were_written(self, op: RecordedOp, counters: list[CounterBefore]) -> None:
        """The op has written these in place; their counters may move until the next op is met."""
        self._unsettled = counters
        op.writes = tuple(dict.fromkeys(counter.record for counter in counters))
        for record in op.writes:
            record.was_written_by(op)
            self._recorded.append(record)

    def settle(self) -> None:
        """The last recorded write has left torch: its records expect what it has moved their counters to."""
        unsettled, self._unsettled = self._unsettled, []
        moved: dict[StorageRecord, list[int]] = {}
        for counter in unsettled:
            moved.setdefault(counter.record, []).append(counter.moved)
        for record, by in moved.items():  # an op moves a counter once for each tensor; more is another's write
            record.version += min(max(by), len(by))


def _break_circles(records: list[StorageRecord]) -> None:
    for record in records:
        record.birth = None
        record.writes = ()
