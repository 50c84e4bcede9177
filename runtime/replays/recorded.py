"""What a tape is written in: storages as recording has seen them, and the ops that bore, read and wrote them.

A :class:`StorageRecord` stands for one storage. An op's tensor arguments become :class:`View`s on such records, so that
a tape keeps nothing alive; what a replay needs to stay is held by its recipe (``replay.py``). Saved values and recipes
are known here by what is asked of them alone.
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
    """What its version counter says if every write was recorded (:class:`CounterBefore` settles what one moved it)."""
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
    save_point: int | None = None
    """Which of the planned ones that was; None before it, and outside the plan."""
    waiting: tuple[weakref.ref[Claim], ...] = ()
    """Recipes that read this storage before it was packed: they claim its value when it comes."""

    def meet(self, version: int, window: int) -> None:
        """It is read or packed, in that window of recording (or ``OFF``), through a tensor of that version.

        A counter that is ahead tells of a write that was not recorded. One that is behind is another's than the
        storage was met by before (a chunk's, that of ``.data``). At zero nobody has ever written through it. Behind
        and not at zero it says nothing, and between windows that is taken for a write, until the save point; from there
        on the plan answers for it, since what is written after its save is never planned to be read by a replay.
        """
        if version < self.version and not version:
            return
        unbroken = self.packed or (window != OFF and window == self.seen_in)
        if version > self.version or (version < self.version and not unbroken):
            self.was_written_unseen()
            self.version = version
        self.seen_in = window

    def was_written_unseen(self) -> None:
        """Something that was not recorded has written it in place."""
        self.writes = (*self.writes, None)
        self.broken = True

    def was_written_by(self, op: RecordedOp) -> None:
        """A recorded op has written it in place."""
        self.writes = (*self.writes, op)
        self.broken |= not op.usable

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
        """Whether its birth and every write since were recorded, as ops that make its content from nothing."""
        if self.birth is None or not self.birth.usable or self.broken:
            return False
        return not self.birth.uninitialised or self._overwritten(len(self.writes))

    def _overwritten(self, generation: int) -> bool:
        first = self.writes[0] if generation >= 1 else None
        return first is not None and first.overwrites is self


class CounterBefore(NamedTuple):
    """The version counter of a tensor that a recorded op is about to write.

    Torch moves a counter after the op has left the dispatcher, and only where the op was called above
    ``ADInplaceOrView``: a kernel's own ``copy_`` moves none, and inside a dispatch mode both look alike. So what the
    write has moved is read off the counter itself when the next op or pack is met. It is once at most for each tensor:
    what is more tells of a write beside it that was not recorded.
    """

    record: StorageRecord
    probe: torch.Tensor
    version: int

    @classmethod
    def of(cls, record: StorageRecord, tensor: torch.Tensor) -> CounterBefore:
        """The counter as it stands."""
        return cls(record, version_probe(tensor), version_of(tensor))

    @property
    def moved(self) -> int:
        """By how much it has moved since."""
        return version_of(self.probe) - self.version


def state_of(generator: torch.Generator) -> bytearray:
    """The generator's state, a copy in Python's memory, since no budget has room for it: each random op on a tape has
    one, which is of 5056 bytes for the CPU's generator.
    """
    with aside():
        state = generator.get_state()
        return bytearray(ctypes.string_at(state.data_ptr(), state.nbytes))  # no op, which modes would look at


def set_state_of(generator: torch.Generator, state: bytearray) -> None:
    """Puts the generator in the state; takes nothing of the device's memory."""
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
