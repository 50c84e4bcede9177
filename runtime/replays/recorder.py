"""Recording: the ops of planned stretches of forward, with their arguments as references that hold no memory.

A :class:`StorageRecord` stands for one storage. An op's tensor arguments become :class:`View`s on such records, so that
a recording keeps nothing alive; what a replay needs to stay is held by its recipe (``replay.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from poochplan.tensors.arguments import Layout, flatten, outputs_of
from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import Traits, traits
from poochplan.tensors.storages import Geometry, is_host_scalar, is_plain, storage_key, version_probe
from poochplan.tensors.torch_private import storage_identity, version_of
from poochplan.tensors.writes import writes_of

if TYPE_CHECKING:
    from poochplan.runtime.engine.saved_value import SavedValue

    from .replay import Recipe


class View(NamedTuple):
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


class RecordedOp:
    """One op as it was called."""

    __slots__ = (
        "arguments",
        "births",
        "func",
        "generator",
        "grad_enabled",
        "order",
        "overwrites",
        "spec",
        "state",
        "uninitialised",
        "usable",
        "writes",
    )

    def __init__(self, order: int, func: Any, arguments: list[Any], spec: Layout) -> None:
        self.order = order
        self.func = func
        self.grad_enabled = torch.is_grad_enabled()
        """Some kernels ask (oneDNN's LSTM returns its workspace only then)."""
        self.usable = True
        """Whether it can be run again."""
        self.uninitialised = False
        """Bears storages whose contents are undefined."""
        self.overwrites: StorageRecord | None = None
        """The storage whose every byte it writes without reading one."""
        self.arguments = arguments
        """Flat arguments, tensors as :class:`View`."""
        self.spec = spec
        self.births: list[tuple[int, StorageRecord]] = []
        """(position among the flat outputs, storage born there)."""
        self.writes: list[StorageRecord] = []
        """Storages that were there before and are written in place."""
        self.generator: torch.Generator | None = None
        self.state: torch.Tensor | None = None
        """Generator state before the op, when it is random."""

    def allocate_only(self, output: torch.Tensor) -> None:
        """Turns an uninitialised allocation into one of the same geometry that reads no tensor (as ``empty_like``)."""
        options = {"dtype": output.dtype, "device": output.device}
        self.func = torch.ops.aten.empty_strided.default
        self.arguments, self.spec = flatten((list(output.shape), list(output.stride())), options)

    def views(self) -> Iterator[View]:
        return (argument for argument in self.arguments if isinstance(argument, View))


OFF = 0
"""Stands for the number of a window where nothing is recorded."""


class StorageRecord:
    """One storage, as far as recording has seen it.

    Contents are told apart by *generation*, the number of writes that recording knows of, not by torch's version
    counters: chunks of ``unsafe_split`` (GRU cells) have counters of their own on one storage. What was written where
    recording was off is one generation more, which nothing can rebuild.
    """

    __slots__ = (
        "__weakref__",
        "birth",
        "broken",
        "key",
        "packed",
        "seen_in",
        "storage",
        "value",
        "version",
        "waiting",
        "writes",
    )

    def __init__(self, storage: torch.UntypedStorage, version: int, registry: dict[int, StorageRecord]) -> None:
        self.key = storage_identity(storage)
        self.birth: RecordedOp | None = None
        self.writes: list[RecordedOp | None] = []
        """What wrote it in place, in order: ``writes[k]`` made generation ``k + 1``; None where it was not recorded."""
        self.broken = False
        """Whether one of the writes was not recorded or cannot be run again."""
        self.version = version
        """What its version counter says if every write was recorded."""
        self.seen_in = OFF
        """The window of recording in which it was last met."""
        self.value: weakref.ref[SavedValue] | None = None
        self.packed = False
        """Whether it has had its save point."""
        self.waiting: list[weakref.ref[Recipe]] = []
        """Recipes that read this storage before it was packed: they claim its value when it comes."""
        # No Python frame, in which a signal could raise: what is raised in a callback is dropped, and the record would
        # stay for the next storage of that key.
        self.storage = weakref.ref(storage, functools.partial(registry.pop, self.key))

    def meet(self, version: int, window: int) -> None:
        """It is read or packed, in that window of recording (or ``OFF``), through a tensor of that version.

        A counter that is ahead tells of a write that was not recorded. One that is behind is a chunk's own: it says
        nothing, and between windows that is taken for a write, until the save point; from there on the plan answers
        for it, since what is written after its save is never planned to be read by a replay.
        """
        unbroken = self.packed or (window != OFF and window == self.seen_in)
        if version > self.version or (version < self.version and not unbroken):
            self.writes.append(None)
            self.broken = True
            self.version = version
        self.seen_in = window

    def was_written_by(self, op: RecordedOp) -> None:
        """A recorded op has written it in place."""
        self.writes.append(op)
        self.broken |= not op.usable
        self.version += 1

    def attach(self, value: SavedValue) -> None:
        """The storage has become a saved value: recipes that read it claim the value instead of what they held."""
        self.value = weakref.ref(value)
        waiting, self.waiting = self.waiting, []
        for reference in waiting:
            recipe = reference()
            if recipe is not None:
                recipe.refresh_if_possible()

    def wait_for_value(self, recipe: Recipe) -> None:
        """Has the recipe refreshed when this storage is packed."""
        if all(reference() is not recipe for reference in self.waiting):
            self.waiting.append(weakref.ref(recipe))

    def value_at(self, generation: int) -> SavedValue | None:
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


class Recorder(ToggledMode):
    """Switched on and off at planned save points. State: the registry of live storages, and the count of ops."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.registry: dict[int, StorageRecord] = {}
        self.static: set[int] = set()
        """Storage keys of parameters and buffers, in this step."""
        self._earlier: dict[int, StorageRecord] = {}
        """Storages that were there before the step, as far as it knows: met in an earlier one, or given to this one."""
        self._recorded: list[StorageRecord] = []
        self._count = 0
        self._window = OFF

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or not self.is_on:
            return func(*args, **(kwargs or {}))
        op, written = self._before(func, facts, args, kwargs or {})
        outputs = func(*args, **(kwargs or {}))
        self._after(op, written, outputs)
        return outputs

    def switch_on(self) -> None:
        """Begins a new window of recording, unless one is open."""
        if not self.is_on:
            self._window += 1
        super().switch_on()

    def forget(self, *, in_use: bool) -> None:
        """Begins with no records. Unless handles of an earlier step are ``in_use``, all that was recorded goes.

        Records and ops refer to each other, so that without this they would wait for the garbage collector.
        """
        self._earlier.clear()  # its records know it, so that dropping it would leave them to the garbage collector
        self._earlier, self.registry = self.registry, self._earlier
        for record in [] if in_use else self._recorded:
            record.birth = None
            record.writes = []
        self._recorded = []

    def is_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The step, which has just begun, is handed these: what is a part of something larger was there before it."""
        for tensor in tensors:
            if is_plain(tensor, self._device_type) and tensor.nbytes < tensor.untyped_storage().nbytes():
                record = StorageRecord(tensor.untyped_storage(), version_of(tensor), self._earlier)
                self._earlier[record.key] = record

    def was_there(self, record: StorageRecord) -> bool:
        """Whether the storage is known to have lived before the step began."""
        return record.key in self._earlier

    def record_of(self, tensor: torch.Tensor) -> StorageRecord:
        """The record of the tensor's storage, made when it is new."""
        storage = tensor.untyped_storage()
        key = storage_identity(storage)
        record = self.registry.get(key)
        if record is None:
            record = self.registry[key] = StorageRecord(storage, version_of(tensor), self.registry)
        return record

    def met(self, tensor: torch.Tensor) -> StorageRecord:
        """The record of a tensor that is read or packed now; what was written where recording was off shows here."""
        record = self.record_of(tensor)
        record.meet(version_of(tensor), self._window if self.is_on else OFF)
        return record

    def _before(
        self, func: Any, facts: Traits, args: Any, kwargs: dict[str, Any]
    ) -> tuple[RecordedOp, list[StorageRecord]]:
        flat, spec = flatten(args, kwargs)
        self._count += 1
        op = RecordedOp(self._count, func, [self._reference(leaf) for leaf in flat], spec)
        writes = writes_of(facts, args, kwargs, static=self.static, device_type=self._device_type)
        for position, tensor in writes.scratch.items():
            op.arguments[position] = Scratch(tuple(tensor.shape), tensor.dtype, tensor.device)
        if facts.random:
            op.generator = _generator_of(flat, self._device_type)
            op.state = op.generator.get_state()
        op.usable = writes.repeatable and not any(argument is _UNUSABLE for argument in op.arguments)
        op.uninitialised = facts.uninitialised
        if writes.overwritten is not None:
            op.overwrites = self.record_of(writes.overwritten)
        written = [self.record_of(tensor) for tensor in writes.in_place if is_plain(tensor, self._device_type)]
        return op, written

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if is_host_scalar(leaf, self._device_type):
            return leaf.detach().clone()  # its number now; it may be another when a replay reads it
        if not is_plain(leaf, self._device_type):
            return _UNUSABLE
        record = self.met(leaf)
        watch = None if record.is_known else (version_probe(leaf), version_of(leaf))
        return View(record, len(record.writes), Geometry.of(leaf), watch)

    def _after(self, op: RecordedOp, written: list[StorageRecord], outputs: Any) -> None:
        if op.uninitialised and isinstance(outputs, torch.Tensor) and not written:
            op.allocate_only(outputs)
        op.writes = list(dict.fromkeys(written))
        for record in op.writes:
            record.was_written_by(op)
            self._recorded.append(record)
        for position, output in enumerate(outputs_of(outputs)):
            if not isinstance(output, torch.Tensor) or not is_plain(output, self._device_type):
                continue
            if storage_key(output) in self.registry:
                continue
            record = self.record_of(output)
            record.birth = op
            record.seen_in = self._window
            self._recorded.append(record)
            op.births.append((position, record))


_UNUSABLE = object()
"""Stands for a tensor argument that a replay cannot reproduce: a subclass, another device, a sparse layout."""


class Scratch(NamedTuple):
    """Stands for running statistics in training: a replay gives the op a throw-away tensor in their place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


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
