"""The types of a tape: storages as seen by recording, and the ops that created, read and wrote them.

A :class:`StorageRecord` stands for one storage. An op's tensor arguments become :class:`View`s on such records, so that
a tape keeps nothing alive; the recipe (``replay.py``) holds what a replay needs. Saved values and recipes appear here
only as protocols.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.operators import Layout, flatten
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.torch_private.tensor_internals import version_of

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


class Claim(Protocol):
    """A recipe, as the tape sees it."""

    def refresh_if_possible(self) -> None:
        """A storage that it reads has become a saved value."""


# A tape makes several of these for each op. The garbage collector ignores them (``gc=False``), because its work on them
# would take longer than recording. Ops and records have reference cycles, which the tape itself breaks.


class View(msgspec.Struct, gc=False, eq=False):
    """A tensor argument: its geometry, and the content that it read."""

    record: StorageRecord
    generation: int
    """Number of recorded writes to the storage before it was read."""
    geometry: Geometry
    watch: tuple[torch.Tensor, int] | None
    """For a storage that cannot be rebuilt: a version probe, and the version that was read."""

    @property
    def still_there(self) -> bool:
        """Whether a storage that cannot be rebuilt still has the content that was read."""
        return self.watch is None or version_of(self.watch[0]) == self.watch[1]


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
    spec: Layout
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
    """One storage, as seen by recording.

    Contents are told apart by *generation*, the number of writes that recording knows, and not by torch's version
    counters: chunks of ``unsafe_split`` (GRU cells) have separate counters on one storage. A write while recording was
    off makes another generation, which nothing can rebuild.
    """

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    """Value of its version counter if every write was recorded (:class:`CounterBefore` settles how far one moved
    it).
    """
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
    waiting: tuple[weakref.ref[Claim], ...] = ()
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
            self.was_written_unseen()
            self.version = version
        self.seen_in = window

    def was_written_unseen(self) -> None:
        """Code that was not recorded has written it in place."""
        self.writes = (*self.writes, None)
        self.broken = True

    def was_written_by(self, op: RecordedOp) -> None:
        """A recorded op has written it in place."""
        self.writes = (*self.writes, op)
        self.broken |= not op.usable

    def attach(self, value: Content) -> None:
        """The storage has become a saved value: recipes that read it now claim the value instead of what they held."""
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


class CounterBefore(NamedTuple):
    """The version counter of a tensor that a recorded op is about to write.

    Torch moves a counter after the op has left the dispatcher, and only if the op was called above ``ADInplaceOrView``:
    a kernel's own ``copy_`` moves none, and inside a dispatch mode both look alike. So the counter itself is read when
    the next op or pack is seen. A write moves it at most once for each tensor: more shows another, unrecorded write.
    """

    record: StorageRecord
    probe: torch.Tensor
    version: int

    @classmethod
    def of(cls, record: StorageRecord, tensor: torch.Tensor) -> CounterBefore:
        """The counter as it is now."""
        return cls(record, version_probe(tensor), version_of(tensor))

    @property
    def moved(self) -> int:
        """How far it has moved since."""
        return version_of(self.probe) - self.version


def state_of(generator: torch.Generator) -> bytearray:
    """The generator's state, copied into Python's memory, because no budget has room for it: each random op on a tape
    has one, of 5056 bytes for the CPU's generator.
    """
    with aside():
        state = generator.get_state()
        return bytearray(ctypes.string_at(state.data_ptr(), state.nbytes))  # not an op, which modes would see


def set_state_of(generator: torch.Generator, state: bytearray) -> None:
    """Puts the generator into the state; takes no memory of the device."""
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
