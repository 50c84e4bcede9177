"""The tape: the ops of the recorded stretches of forward, as references that hold no memory (``recorded.py``). The
recorder writes the tape; it is switched on and off at planned points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from poochplan.tensors.modes import ToggledMode, is_dispatched_plainly
from poochplan.tensors.operators import (
    Layout,
    Traits,
    Writes,
    flatten,
    is_chosen_by_timing,
    outputs_of,
    traits,
    writes_of,
)
from poochplan.tensors.storages import Geometry, is_host_scalar, is_plain, plain_storage, version_probe
from poochplan.torch_private.tensor_internals import called_below_autograd, storage_identity, version_of

from .recorded import OFF, Birth, Content, CounterBefore, RecordedOp, Scratch, StorageRecord, View, state_of


class Recorder(ToggledMode):
    """A dispatch mode. State: whether it is on, and whether the op during which it was switched on may still be
    running.

    A save point lies within an op. Later calls of that op's kernel are not recorded: their views have separate version
    counters, as if they were on another storage.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._device_type = tape.device_type
        self._within_op = False

    @property
    def window(self) -> int:
        """The window of recording that is open, or ``OFF``."""
        return self.tape.window if self.is_on else OFF

    def switch_on(self) -> None:
        """Begins a new window of recording, unless one is open."""
        if not self.is_on:
            self.tape.window += 1
            self._within_op = is_dispatched_plainly()  # otherwise a mode gets that op as a whole
        super().switch_on()

    def switch_off(self) -> None:
        """Ends the window: later writes are not recorded."""
        super().switch_off()
        self.tape.settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or not self.is_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if self._within_op and self._is_of_that_op(facts, args, kwargs):
            self._pass_over(facts, args, kwargs)
            return func(*args, **kwargs)
        op, written = self._before(func, facts, args, kwargs)
        outputs = func(*args, **kwargs)
        self._after(op, written, outputs)
        return outputs

    def _is_of_that_op(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call belongs to the op during which recording was switched on. The first call that does not ends
        the question.

        A call that makes a tensor from none looks the same in both cases, and is recorded.
        """
        if facts.makes_alike or not any(isinstance(leaf, torch.Tensor) for leaf in flatten(args, kwargs)[0]):
            return False
        self._within_op = called_below_autograd()
        return self._within_op

    def _pass_over(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> None:
        """Marks the writes of this call as unrecorded."""
        for tensor in self._writes(facts, args, kwargs).in_place:
            record = self.tape.known(tensor) if is_plain(tensor, self._device_type) else None
            if record is not None:
                record.was_written_unseen()

    def _before(
        self, func: Any, facts: Traits, args: Any, kwargs: dict[str, Any]
    ) -> tuple[RecordedOp, list[CounterBefore]]:
        flat, spec = flatten(args, kwargs)
        usable = facts.trusted and not is_chosen_by_timing(facts, self._device_type)
        arguments: list[Any] = []
        reads: list[View] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                leaf = self._reference(leaf)
                if type(leaf) is View:
                    reads.append(leaf)
                elif leaf is _UNUSABLE:
                    usable = False
            arguments.append(leaf)
        op = self.tape.next_op(func, tuple(arguments), tuple(reads), spec, usable=usable)
        op.uninitialised = facts.uninitialised
        if facts.random:
            op.generator = _generator_of(flat, self._device_type)
            op.state = state_of(op.generator)
        return op, self._written(op, facts, args, kwargs) if facts.may_write else _NONE

    def _written(self, op: RecordedOp, facts: Traits, args: Any, kwargs: dict[str, Any]) -> list[CounterBefore]:
        """The storages that the op writes in place; completes the facts about the op."""
        writes = self._writes(facts, args, kwargs)
        if writes.scratch:
            arguments = list(op.arguments)
            for position, tensor in writes.scratch.items():
                arguments[position] = Scratch(tuple(tensor.shape), tensor.dtype, tensor.device)
            op.arguments = tuple(arguments)
            op.reads = tuple(argument for argument in arguments if type(argument) is View)
        op.usable = op.usable and writes.repeatable
        if writes.overwritten is not None:
            op.overwrites = self.tape.record_of(writes.overwritten)
        plain = (tensor for tensor in writes.in_place if is_plain(tensor, self._device_type))
        return [CounterBefore.of(self.tape.record_of(tensor), tensor) for tensor in plain]

    def _writes(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> Writes:
        return writes_of(facts, args, kwargs, static=self.tape.static, device_type=self._device_type)

    def _reference(self, leaf: torch.Tensor) -> Any:
        storage = plain_storage(leaf, self._device_type)
        if storage is None:
            # A number in host memory is copied now, because it may change before a replay reads it.
            return leaf.detach().clone() if is_host_scalar(leaf, self._device_type) else _UNUSABLE
        record = self.tape.met(leaf, storage, self.tape.window)
        watch = None if record.is_known else (version_probe(leaf), version_of(leaf))
        return View(record, len(record.writes), Geometry.of(leaf), watch)

    def _after(self, op: RecordedOp, written: list[CounterBefore], outputs: Any) -> None:
        if op.uninitialised and isinstance(outputs, torch.Tensor) and not written:
            op.allocate_only(outputs)
        if written:
            self.tape.were_written(op, written)
        if isinstance(outputs, torch.Tensor):
            self._born(op, 0, outputs)
            return
        for position, output in enumerate(outputs_of(outputs)):
            if isinstance(output, torch.Tensor):
                self._born(op, position, output)

    def _born(self, op: RecordedOp, position: int, output: torch.Tensor) -> None:
        storage = plain_storage(output, self._device_type)
        if storage is not None:
            self.tape.was_born(op, position, output, storage)


_NONE: list[CounterBefore] = []
_UNUSABLE = object()
"""Stands for a tensor argument that a replay cannot reproduce: a subclass, another device, a sparse layout."""


def _generator_of(flat: list[Any], device_type: str) -> torch.Generator:
    for leaf in flat:
        if isinstance(leaf, torch.Generator):
            return leaf
    if device_type != "cuda":
        return torch.default_generator
    places = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None) for leaf in flat]
    indices = [place.index for place in places if place is not None and place.type == "cuda"]
    known = next((index for index in indices if index is not None), None)
    return torch.cuda.default_generators[torch.cuda.current_device() if known is None else known]


class Tape:
    """The ops of a step. State: the registry of storages, the number of ops, and the current window.

    The registry uses identity, which another storage gets once the first is gone: a record belongs to a storage only as
    long as its weak reference says so.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.static: dict[int, int] = {}
        """Storage keys of parameters and buffers in this step, and their version counters at its beginning."""
        self.window = OFF
        """Number of the window that is being recorded, or was last; windows count from 1."""
        self._registry: dict[int, StorageRecord] = {}
        self._earlier: dict[int, StorageRecord] = {}
        """Storages known to be from before the step: seen in an earlier step, or passed to this one."""
        self._recorded: list[StorageRecord] = []
        self._kept: list[tuple[Callable[[], bool], list[StorageRecord]]] = []
        """Records of earlier steps whose handles may still be replayed from them."""
        self._count = 0
        self._unsettled: list[CounterBefore] = []
        """Counters of the last write, until torch has moved them."""

    def __del__(self) -> None:
        for records in (self._recorded, *(records for _, records in self._kept)):
            _break_circles(records)

    def forget(self, is_held: Callable[[], bool] = lambda: False) -> None:
        """Starts without records. Old records are dropped as soon as ``is_held`` says that no handle of theirs is left.

        Records and ops refer to each other, and nothing else would discover that they are garbage.
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
        """Number of live storages of this step."""
        return sum(record.storage() is not None for record in self._registry.values())

    def is_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The step, which has just begun, gets these tensors. A tensor that is a part of a larger storage existed
        before the step.
        """
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
        """Whether the step has saved a tensor on that storage, or a recorded op has read one."""
        record = self._registry.get(storage_identity(storage))
        return record is not None and record.storage() is storage

    def known(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of the tensor's storage, if there is one."""
        storage = tensor.untyped_storage()
        record = self._registry.get(storage_identity(storage))
        return record if record is not None and record.storage() is storage else None

    def record_of(self, tensor: torch.Tensor) -> StorageRecord:
        """The record of the tensor's storage, made if it is new."""
        return self.known(tensor) or self._new(tensor, tensor.untyped_storage())

    def _new(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> StorageRecord:
        key = storage_identity(storage)
        before = self._earlier.get(key)
        was_there = before is not None and before.storage() is storage
        version = self.static.get(key)  # the tensor may be one of `.data`, which has its own counter
        if version is None:
            version = version_of(tensor)
        record = self._registry[key] = StorageRecord(weakref.ref(storage), version, was_there)
        return record

    def met(self, tensor: torch.Tensor, storage: torch.UntypedStorage, window: int) -> StorageRecord:
        """The record of a tensor that is read or packed in that window. Unrecorded writes are detected here."""
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
        """An op that is about to run, the next one in order."""
        self._count += 1
        return RecordedOp(self._count, func, arguments, reads, spec, torch.is_grad_enabled(), usable)

    def was_born(self, op: RecordedOp, position: int, output: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """The op has returned its output at ``position``. If the storage is unknown, the op has created it."""
        key = storage_identity(storage)
        record = self._registry.get(key)
        if record is not None and record.storage() is storage:
            return
        record = StorageRecord(weakref.ref(storage), version_of(output), birth=op, seen_in=self.window)
        self._registry[key] = record
        self._recorded.append(record)
        op.births = (*op.births, Birth(position, record))

    def were_written(self, op: RecordedOp, counters: list[CounterBefore]) -> None:
        """The op has written these in place; their counters may move until the next op is seen."""
        self._unsettled = counters
        op.writes = tuple(dict.fromkeys(counter.record for counter in counters))
        for record in op.writes:
            record.was_written_by(op)
            self._recorded.append(record)

    def settle(self) -> None:
        """Torch has finished the last recorded write: its records now expect the counters as moved."""
        unsettled, self._unsettled = self._unsettled, []
        moved: dict[StorageRecord, list[int]] = {}
        for counter in unsettled:
            moved.setdefault(counter.record, []).append(counter.moved)
        for record, by in moved.items():  # an op increases a counter once for each tensor; more is another op's write
            record.version += min(max(by), len(by))


def _break_circles(records: list[StorageRecord]) -> None:
    for record in records:
        record.birth = None
        record.writes = ()
