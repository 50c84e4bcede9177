"""What is recorded, and running it again: ops and storages as recording sees them.

A :class:`StorageRecord` stands for one storage. The ops that created, read and wrote it refer to it by :class:`View`s,
so that a tape keeps nothing alive. Ops run again from given contents, under their grad mode, generator states and
switches.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from poochplan.runtime.devices.backend import Generator
from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.operators import ArgumentTree, Flat, outputs_of, unflatten
from poochplan.tensors.storages import Geometry, bytes_of
from poochplan.torch_private.switches import SwitchesAsRecorded, SwitchState
from poochplan.torch_private.tensor_internals import WIDENING, outside_transforms, version_of

from .host_copies import HostCopy

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


class Waiting(Protocol):
    """A recipe, as a storage sees it that has no save point yet."""

    def refresh(self) -> None:
        """The storage has become a saved value."""


# A tape makes several of these for each op. The garbage collector ignores them (``gc=False``), because its work on them
# would take longer than recording. Ops and records have reference cycles, which the tape itself breaks.


class View(msgspec.Struct, gc=False, eq=False):
    """A tensor argument: its geometry, and the content that it read."""

    record: StorageRecord
    generation: int
    """Number of recorded writes to the storage before it was read."""
    geometry: Geometry
    probe: tuple[torch.Tensor, int] | None
    """For a storage that cannot be rebuilt: a version probe, and the version that was read."""
    source: tuple[torch.Tensor, int] | None = None
    """The same for an argument of which the op may make a larger copy."""


class Scratch(NamedTuple):
    """Stands for running statistics in training: a replay gives the op a temporary tensor in their place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Birth(msgspec.Struct, gc=False, eq=False):
    """A storage that an op has created, and the position of its tensor among the op's flat outputs."""

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
    spec: ArgumentTree
    grad_enabled: bool
    """Some kernels depend on it (oneDNN's LSTM returns its workspace only with it)."""
    usable: bool = True
    """Whether it can be run again."""
    uninitialised: bool = False
    """Creates storages with undefined contents."""
    overwrites: StorageRecord | None = None
    """The storage whose every byte it writes without reading one."""
    births: tuple[Birth, ...] = ()
    writes: tuple[StorageRecord, ...] = ()
    """Storages from before the op that it writes in place."""
    generator: Generator | None = None
    state: bytearray | None = None
    """Generator state before the op, when it is random."""
    switches: SwitchState | None = None
    """How torch's switches were; None for those of now."""


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
    waiting: dict[int, weakref.ref[Waiting]] | None = None
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

    def wait_for_value(self, recipe: Waiting) -> None:
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


class NotReplayable(Exception):  # noqa: N818 - a verdict, caught where the recipe is made
    """A writer was not recorded, is opaque, or an input is gone. The value is swapped instead; if that is found in
    backward, when the replay is to run, it is an error.

    ``record``: the input concerned, if there is one.
    """

    def __init__(self, reason: str, record: StorageRecord | None = None) -> None:
        super().__init__(reason)
        self.record = record


def storage_of(record: StorageRecord) -> torch.UntypedStorage:
    """The storage that a record stands for; raises ``NotReplayable`` when it is gone."""
    storage = record.storage()
    if storage is None:
        raise NotReplayable("a tensor that it needs is gone")
    return storage


# -- running ops again ------------------------------------------------------------------------------------------------

Leaves = dict[tuple[StorageRecord, int], torch.UntypedStorage]
"""The starting points of a replay: the storage of each content that it does not build."""
Parts = list[tuple[StorageRecord, torch.Tensor]]
"""Storages that a replay reads and the step has not made, with their bytes in place."""
Around = Callable[[Parts], contextlib.AbstractContextManager[None]]
"""Returns the block in which a replay's ops run."""


def run_ops(
    ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
) -> dict[StorageRecord, torch.UntypedStorage]:
    """Runs the ops in order and returns the storages of the records in ``keep``; frees others after their last use."""
    last_use = {view.record: op.order for op in ops for view in op.reads}
    built: dict[StorageRecord, torch.UntypedStorage] = {}
    with outside_transforms(), contextlib.ExitStack() as stack:  # it makes no graph, because its inputs are detached
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        with_gradients, switches = torch.is_grad_enabled(), stack.enter_context(SwitchesAsRecorded())
        for op in ops:
            if op.switches is not None:
                switches.turn(op.switches)
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
    try:
        set_state_of(op.generator, op.state)
        return outputs_of(op.func(*args, **kwargs))
    finally:
        try:
            set_state_of(op.generator, now)
        except BaseException:  # what raises there, or an interrupt, must not change what the step draws next
            set_state_of(op.generator, now)
            raise


def _tensor(
    argument: View | Scratch, op: RecordedOp, there: Leaves, built: dict[StorageRecord, torch.UntypedStorage]
) -> torch.Tensor:
    if isinstance(argument, Scratch):
        return torch.ones(argument.shape, dtype=argument.dtype, device=argument.device)
    # The op only writes the replay's own storages, never a saved value.
    owned = argument.record in op.writes
    storage = None if owned else there.get((argument.record, argument.generation))
    return argument.geometry.on(built[argument.record] if storage is None else storage)


def parts_read(ops: list[RecordedOp], there: Leaves) -> Parts:
    """The bytes that the ops see of each earlier storage, in pieces that do not overlap."""
    storages: dict[StorageRecord, torch.UntypedStorage] = {}
    extents: dict[StorageRecord, set[tuple[int, int]]] = {}
    for op in ops:
        for view in op.reads:
            # A part of a storage that the step has not made (or has made where recording could not see it).
            was_there = view.record.birth is None and (view.record, view.generation) in there
            if was_there and view.record not in op.writes:
                storages[view.record] = there[view.record, view.generation]
                extents.setdefault(view.record, set()).add(_extent(view.geometry))
    wholes = {record: bytes_of(storage) for record, storage in storages.items()}
    return [
        (record, wholes[record][begin:end])
        for record, pieces in extents.items()
        for begin, end in _merged(sorted(pieces))
    ]


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, each once."""
    merged: list[tuple[int, int]] = []
    for begin, end in pieces:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _extent(geometry: Geometry) -> tuple[int, int]:
    """First byte on the storage, and the byte after the last."""
    count = 0
    if 0 not in geometry.shape:
        count = 1 + sum((size - 1) * stride for size, stride in zip(geometry.shape, geometry.stride, strict=True))
    return geometry.offset * geometry.dtype.itemsize, (geometry.offset + count) * geometry.dtype.itemsize


def state_of(generator: Generator) -> bytearray:
    """The generator's state, copied into Python's memory, because no budget has room for it: each random op on a tape
    has one, of 5056 bytes for the CPU's generator.
    """
    with aside():
        state = generator.get_state()
        return bytearray(ctypes.string_at(state.data_ptr(), state.nbytes))  # not an op, which modes would see


def set_state_of(generator: Generator, state: bytearray) -> None:
    """Puts the generator into the state; takes no memory of the device."""
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
