"""The tape: the ops of the recorded stretches of forward, as references that hold no memory (``replay.py``). The
recorder writes the tape; it is switched on and off at planned points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from poochplan.runtime.devices.backend import Generator, backend_of
from poochplan.tensors.modes import ToggledMode, is_dispatched_plainly
from poochplan.tensors.operators import (
    Traits,
    flatten,
    is_chosen_by_timing,
    outputs_of,
    traits,
    writes_of,
)
from poochplan.tensors.storages import Geometry, is_host_scalar, is_plain, own_tensors, plain_storage, version_probe
from poochplan.torch_private.switches import state_now
from poochplan.torch_private.tensor_internals import WIDENING, called_below_autograd, storage_identity, version_of

from .host_copies import MOST_BYTES, MOST_OTHERS_BYTES
from .recipes import Recipe, replay
from .replay import OFF, Around, Birth, Content, CounterBefore, RecordedOp, Scratch, StorageRecord, View, state_of


class Recorder(ToggledMode):
    """A dispatch mode. State: whether it is on, and whether the op in which it was switched on may still run.

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
            return self.run_op(func, args, kwargs)
        kwargs = kwargs or {}
        if self._within_op and self._is_of_that_op(facts, args, kwargs):
            self._pass_over(facts, args, kwargs)
            return self.run_op(func, args, kwargs)
        op, written = self._before(func, facts, args, kwargs)
        outputs = self.run_op(func, args, kwargs)
        self._after(op, written, outputs)
        return outputs

    def _is_of_that_op(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call belongs to the op in which recording was switched on, which the first that does not ends.

        A call that makes a tensor from none looks the same in both cases, and is recorded.
        """
        if facts.makes_alike or not any(isinstance(leaf, torch.Tensor) for leaf in flatten(args, kwargs)[0]):
            return False
        self._within_op = called_below_autograd()
        return self._within_op

    def _pass_over(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> None:
        """Marks the writes of this call as unrecorded."""
        for tensor in writes_of(facts, args, kwargs, self.tape.static, self._device_type).in_place:
            storage = plain_storage(tensor, self._device_type)
            record = self.tape.known(storage) if storage is not None else None
            if record is not None:
                record.was_written(None)

    def _before(
        self, func: Any, facts: Traits, args: Any, kwargs: dict[str, Any]
    ) -> tuple[RecordedOp, list[CounterBefore]]:
        flat, spec = flatten(args, kwargs)
        usable = facts.trusted and not is_chosen_by_timing(facts, self._device_type)
        arguments: list[Any] = []
        reads: list[View] = []
        may_be_held = func in WIDENING
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                leaf = self._reference(leaf, may_be_held=may_be_held)
                if type(leaf) is View:
                    reads.append(leaf)
                elif leaf is _UNUSABLE:
                    usable = False
            arguments.append(leaf)
        self.tape.count += 1
        op = RecordedOp(self.tape.count, func, tuple(arguments), tuple(reads), spec, torch.is_grad_enabled(), usable)
        op.uninitialised, op.switches = facts.uninitialised, state_now(self._device_type)
        if facts.random:
            op.generator = _generator_of(flat, self._device_type)
            op.state = state_of(op.generator)
        return op, self._written(op, facts, args, kwargs) if facts.may_write else []

    def _written(self, op: RecordedOp, facts: Traits, args: Any, kwargs: dict[str, Any]) -> list[CounterBefore]:
        """The storages that the op writes in place; completes the facts about the op."""
        writes = writes_of(facts, args, kwargs, self.tape.static, self._device_type)
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
        counters = [CounterBefore(self.tape.record_of(one), version_probe(one), version_of(one)) for one in plain]
        for record in {counter.record for counter in counters}:
            if record.birth is None and record.is_awaited:
                record.keep_copy(len(record.writes))
        return counters

    def _reference(self, leaf: torch.Tensor, *, may_be_held: bool) -> Any:
        storage = plain_storage(leaf, self._device_type)
        if storage is None:
            # A number in host memory is copied now, because it may change before a replay reads it.
            return leaf.detach().clone() if is_host_scalar(leaf, self._device_type) else _UNUSABLE
        record = self.tape.met(leaf, storage, self.tape.window)
        probe = None if record.is_known else (version_probe(leaf), version_of(leaf))
        source = (probe or (version_probe(leaf), version_of(leaf))) if may_be_held else None
        return View(record, len(record.writes), Geometry.of(leaf), probe, source)

    def _after(self, op: RecordedOp, written: list[CounterBefore], outputs: Any) -> None:
        if op.uninitialised and isinstance(outputs, torch.Tensor) and not written:
            # An allocation of the same geometry reads no tensor, unlike ``empty_like``.
            options = {"dtype": outputs.dtype, "device": outputs.device}
            arguments, op.spec = flatten((list(outputs.shape), list(outputs.stride())), options)
            op.func, op.arguments, op.reads = torch.ops.aten.empty_strided.default, tuple(arguments), ()
        if written:
            self.tape.were_written(op, written)
        for position, output in enumerate(outputs_of(outputs)):
            storage = plain_storage(output, self._device_type) if isinstance(output, torch.Tensor) else None
            if storage is not None:
                self.tape.was_born(op, position, output, storage)


_UNUSABLE = object()
"""Stands for a tensor argument that a replay cannot reproduce: a subclass, another device, a sparse layout."""


def _generator_of(flat: list[Any], device_type: str) -> Generator:
    for leaf in flat:
        if isinstance(leaf, torch.Generator):
            return leaf
    places = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None) for leaf in flat]
    indices = [place.index for place in places if place is not None and place.type == device_type]
    return default_generator(device_type, next((index for index in indices if index is not None), None))


def default_generator(device_type: str, index: int | None) -> Generator:
    """The one from which an op draws that is given none, on the device of that index or on the current one."""
    if device_type == "cpu":
        return torch.default_generator
    return backend_of(torch.device(device_type) if index is None else torch.device(device_type, index)).generator()


class NoPlannedHooks:
    """The tape of Python has no hooks of its own: all saves and uses are the engine's."""

    is_off = False

    def before(self, *hooks: Any, guard: object = None) -> Any:
        return hooks

    def engine_runs(self, begins: bool) -> None:
        pass

    def pack(self, tensor: torch.Tensor) -> None:
        return None

    def unpack(self, handle: object) -> None:
        return None

    def follow(self, segment: object, followed: object) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take_seconds(self) -> float:
        return 0.0


class Tape:
    """The ops of a step. State: the registry of storages, the number of ops, and the current window.

    The registry uses identity, which another storage gets once the first is gone: a record belongs to a storage only as
    long as its weak reference says so.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.static: dict[int, int] = {}
        """Storage keys of parameters and buffers in this step, and their version counters at its beginning."""
        self.buffers, self.own_ids = set[int](), set[int]()
        """Storage keys of those that a step may write without an error in-core: buffers, and biases; and the identities
        of all parameters and buffers, as tensors.
        """
        self.at_first_recipe: Callable[[], None] | None = None
        """Is called once, if something is to be replayed."""
        self.is_paused = False
        """Whether a hook runs, whose ops are not the step's. A dispatch mode is kept away from these by other means."""
        self.window = OFF
        """Number of the window that is being recorded, or was last; windows count from 1."""
        self._registry: dict[int, StorageRecord] = {}
        self._earlier: dict[int, StorageRecord] = {}
        """Storages known to be from before the step: seen in an earlier step, or passed to this one."""
        self._recorded: list[StorageRecord] = []
        self._kept: list[tuple[Callable[[], bool], list[StorageRecord]]] = []
        """Records of earlier steps whose handles may still be replayed from them."""
        self.count = 0
        """Number of ops so far."""
        self._unsettled: list[CounterBefore] = []
        """Counters of the last write, until torch has moved them."""

    def __del__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops all records: nothing is replayed from them any more."""
        for records in (self._recorded, *(records for _, records in self._kept)):
            _break_circles(records)
        self._registry, self._earlier, self._recorded, self._kept, self._unsettled = {}, {}, [], [], []

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

    def is_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The step that begins gets these tensors. A part of a larger storage existed before the step."""
        for tensor in tensors:
            if is_plain(tensor, self.device_type) and tensor.nbytes < tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                record = StorageRecord(weakref.ref(storage), version_of(tensor))
                self._earlier[storage_identity(storage)] = record

    def look_at(self, model: torch.nn.Module) -> tuple[int, Iterable[torch.Tensor]]:
        """The model's own tensors are found anew. Returns bytes of gradients, and the tensors that are still to be
        noted: here all. The identities of all are noted.
        """
        self.static.clear()
        self.buffers.clear()
        own = list(own_tensors(model))
        self.own_ids = set(map(id, own))
        return 0, own

    def copies(self, device: object) -> Any:
        """What queues the device's copies, if that is compiled."""
        return None

    def planned_hooks(self, *_: object) -> Any:
        return NoPlannedHooks()

    def recipe(self, record: StorageRecord, generation: int) -> Recipe:
        """What the replay of this content needs; raises ``NotReplayable``."""
        if self.at_first_recipe is not None:
            call, self.at_first_recipe = self.at_first_recipe, None
            call()
        return Recipe(record, generation)

    def replay(
        self, value: Content, resident: Callable[[Content], torch.UntypedStorage], around: Around | None = None
    ) -> list[Content]:
        """Brings values back: see :func:`replay`."""
        return replay(value, resident, self.device_type, around)

    def earlier_values(self) -> list[Content | None]:
        """Saved values of earlier steps; None for those that are not alive."""
        return [record.value() for record in self._earlier.values() if record.value is not None]

    def registered(self) -> list[StorageRecord]:
        """The records of the storages that the step has met."""
        return list(self._registry.values())

    def known(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """The record of the storage. None if the step has saved no tensor on it, and no recorded op has read one."""
        record = self._registry.get(storage_identity(storage))
        return record if record is not None and record.storage() is storage else None

    def record_of(self, tensor: torch.Tensor) -> StorageRecord:
        """The record of the tensor's storage, made if it is new."""
        storage = tensor.untyped_storage()
        return self.known(storage) or self._new(tensor, storage)

    def _new(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> StorageRecord:
        key = storage_identity(storage)
        before = self._earlier.get(key)
        was_there = before is not None and before.storage() is storage
        static = self.static.get(key)  # the tensor may be one of `.data`, which has its own counter
        version = version_of(tensor) if static is None else static
        record = self._registry[key] = StorageRecord(weakref.ref(storage), version, was_there)
        most_bytes = MOST_BYTES if key in self.buffers else MOST_OTHERS_BYTES if was_there and static is None else 0
        record.may_copy = storage.nbytes() <= most_bytes
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
            record.was_written(op)
            self._recorded.append(record)

    def settle(self) -> None:
        """Torch has finished the last recorded write: its records now expect the counters as moved."""
        unsettled, self._unsettled = self._unsettled, []
        moved: dict[StorageRecord, list[int]] = {}
        for counter in unsettled:
            moved.setdefault(counter.record, []).append(version_of(counter.probe) - counter.version)
        for record, by in moved.items():  # an op increases a counter once for each tensor; more is another op's write
            record.version += min(max(by), len(by))


def _break_circles(records: list[StorageRecord]) -> None:
    for record in records:
        record.birth = None
        record.writes = ()
