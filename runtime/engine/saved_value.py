"""SavedValue: one value in the engine, by states and transitions. SavedHandle: what autograd holds for one pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec
import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision, PlannedValue
from poochplan.runtime.devices.device import Stream
from poochplan.runtime.devices.transfers import Copy
from poochplan.runtime.replays.recipes import Recipe
from poochplan.runtime.replays.replay import StorageRecord
from poochplan.tensors.storages import Geometry, Shell, check_unwritten, counted_by, geometry, version_probe
from poochplan.torch_private.tensor_internals import detached_alias, version_of


class ValueState(Enum):
    """Where a saved value is. The state decides which of its fields are valid."""

    ON_DEVICE = "on the device"
    """``storage``; nothing on the host."""
    COPIED = "on the device and on the host"
    """``storage`` and ``out_copy``, which may still be running."""
    ON_HOST = "on the host"
    """``host_offset``, and ``out_copy``, which has ended."""
    ARRIVING = "on its way back"
    """``storage`` and ``in_copy``, which fills it. The host has the value too."""
    TO_REPLAY = "to be replayed"
    """``recipe``."""


class SavedValue(msgspec.Struct, eq=False, weakref=True):
    """A saved value. It lives as long as a handle, a recipe, or a step policy that expects another handle refers to it.

    What raises in a transition leaves the old state or the new one, by which :meth:`Mechanism.rescued` finds the value.
    A state that guarantees a filled storage is entered last; one that guarantees nothing about it is entered first.
    """

    decision: Decision
    record: Any
    """Its ``StorageRecord``, of either tape; None for one that the compiled hooks have noted and that stays."""
    generation: int
    probe: torch.Tensor
    """It shares the value's version counter. For a value that is kept it is also the first handle's tensor."""
    version: int
    geometry: Geometry | None
    """The geometry of its tensor on the storage; None if the probe is that tensor."""
    size_bytes: int
    storage: torch.UntypedStorage | None
    home: Stream | None = None
    """The compute stream on which ``storage`` was saved or came back."""
    index: int | None = None
    """Its save point, or None outside the plan."""
    name: str = "a saved value"
    state: ValueState = ValueState.ON_DEVICE
    host_offset: int = -1
    out_copy: Copy | None = None
    in_copy: Copy | None = None
    recipe: Recipe | None = None
    beside: Any = None
    """What the audit knows of it while it is released."""
    note: int = 0
    """By which its released storage may be found again."""
    other_parts: tuple[Geometry, ...] = ()
    """Parts of its storage that were saved behind the first one, each once. Empty if it is kept."""

    @classmethod
    def of(cls, decision: Decision, record: StorageRecord, tensor: torch.Tensor, home: Stream | None) -> SavedValue:
        """The value of a tensor that is on the device, if no other value still stands for its storage."""
        storage = tensor.untyped_storage()
        if decision is Decision.KEEP:
            probe, geometry = detached_alias(tensor), None
        else:
            probe, geometry = version_probe(tensor), Geometry.of(tensor)
        written, version = record.generation, version_of(tensor)
        return cls(decision, record, written, probe, version, geometry, storage.nbytes(), storage, home)

    @property
    def unwritten(self) -> bool:
        """Whether its version counter shows no write since it was saved."""
        return version_of(self.probe) == self.version

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether a later pack of the same storage has the same content.

        From the profile it is known that nothing wrote between the packs of a planned value. Without a plan only
        exactly the same part of the storage counts: chunks with separate version counters may have been written
        unnoticed.
        """
        if not self.unwritten:
            return False
        return self.index is not None or (self.geometry or Geometry.of(self.probe)) == Geometry.of(tensor)

    @property
    def waits_for_replay(self) -> bool:
        """Whether only a replay brings it back."""
        return self.state is ValueState.TO_REPLAY

    @property
    def parts(self) -> Sequence[Geometry]:
        """The parts of its storage that are saved, in the order of their packs."""
        return (self.geometry or Geometry.of(self.probe), *self.other_parts)

    # -- transitions ------------------------------------------------------------------------------------------

    def is_copied(self, copy: Copy, offset: int) -> None:
        """A copy of it to the host has been queued."""
        self.host_offset = offset
        self.out_copy = copy
        self._enter(ValueState.COPIED, ValueState.ON_DEVICE)

    def is_released(self) -> None:
        """Its device storage is released; the host has the value."""
        self._enter(ValueState.ON_HOST, ValueState.COPIED, ValueState.ARRIVING)
        self.in_copy = None  # a copy that goes waits
        self.storage = None

    def copy_has_failed(self) -> None:
        """The host does not have the value: it stays on the device permanently."""
        self._enter(ValueState.ON_DEVICE, ValueState.COPIED)
        self.host_offset, self.out_copy, self.decision = -1, None, Decision.KEEP

    def is_fetched(self, storage: torch.UntypedStorage, home: Stream, copy: Copy) -> None:
        """A copy back, into ``storage``, has been queued."""
        self.home, self.in_copy = home, copy
        self.storage = storage
        self._enter(ValueState.ARRIVING, ValueState.ON_HOST)

    def arrived(self) -> float:
        """Waits for the copy that fills it, if any. Returns the seconds. Raises ``SpillError`` if the read failed."""
        if self.in_copy is None or self.state is not ValueState.ARRIVING:
            return 0.0
        waited_s = self.in_copy.wait()
        error = self.in_copy.error
        if error is not None:
            self.is_released()
            raise SpillError(
                f"a swapped tensor of {self.size_bytes} bytes could not be read back ({error.strerror}); "
                "this step's gradients are lost, check the disk"
            ) from error
        self._enter(ValueState.COPIED, ValueState.ARRIVING)
        self.in_copy = None
        return waited_s

    def came_from_host(self, storage: torch.UntypedStorage) -> None:
        """It was read into ``storage`` without a queued copy. The host has it too."""
        self.storage, self.home = storage, None
        self._enter(ValueState.COPIED, ValueState.ON_HOST, ValueState.ARRIVING)
        self.in_copy = None

    def is_dropped(self, recipe: Recipe) -> None:
        """Its device storage is released; the recipe brings the value back."""
        self.recipe = recipe
        self._enter(ValueState.TO_REPLAY, ValueState.ON_DEVICE)
        self.storage = None

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """A replay has rebuilt it. The recipe, and all that it claimed, is released."""
        if storage.nbytes() != self.size_bytes:
            raise RuntimeError(
                f"recomputing gave {storage.nbytes()} bytes, {self.size_bytes} were saved; profile and plan again"
            )
        self.storage = storage
        self._enter(ValueState.ON_DEVICE, ValueState.TO_REPLAY)
        self.recipe = None

    def _enter(self, state: ValueState, *before: ValueState) -> None:
        """Enters a state, from one of those that may come before."""
        assert self.state in before, f"not a value that is {self.state.value}"
        self.state = state


def held_source(record: StorageRecord, planned: PlannedValue, home: Stream | None) -> SavedValue | None:
    """The source of a storage; None if no replay starts from it, or it is not as planned."""
    read = record.source() if planned.until >= 0 else None  # Rule 12
    storage = read.record.storage() if read is not None else None
    if read is None or storage is None or storage.nbytes() > planned.size_bytes:
        return None
    if read.record.value is not None and read.record.value() is not None:
        return None
    of, generation, geometry, probe, version = read
    value = SavedValue(planned.decision, of, generation, probe, version, geometry, storage.nbytes(), storage, home)
    read.record.attach(value)
    return value


class Lease:
    """Every handle on a segment's values holds its lease. So it dies with the last handle.

    The leases of all segments hold ``whole``, which dies with the last of them.
    """

    __slots__ = ("__weakref__", "late_uses", "whole")

    def __init__(self, whole: Lease | None = None, late_uses: list[int] | None = None) -> None:
        self.whole = whole
        self.late_uses = late_uses
        """The handles that were first used after their segment, by ordinal: the segment's list."""


class SavedHandle(msgspec.Struct, gc=False, eq=False):
    """One pack. ``value``: None for a tensor that the engine leaves alone; ``segment``: the number of its segment.

    The garbage collector does not track handles (``gc=False``): autograd holds them, where it could not see them.
    """

    tensor: torch.Tensor
    """The tensor that is returned, detached. If there is a ``geometry``, it is a version probe of that tensor."""
    version: int
    geometry: Geometry | None = None
    value: SavedValue | None = None
    lease: Lease | None = None
    segment: int = 0
    ordinal: int = -1
    used: bool = False
    shell: Shell | None = None
    """Of a DTensor, whose local tensor is the ``tensor`` (engine rule 13)."""

    @classmethod
    def untouched(cls, tensor: torch.Tensor) -> SavedHandle:
        """A handle of a tensor that the engine leaves alone. A leaf is held itself, as autograd does: it may get other
        ``.data`` before backward, and code there may read its attributes.
        """
        held = tensor if tensor.grad_fn is None else tensor.detach()  # engine rule 4
        return cls(held, 0 if tensor.is_inference() else version_of(tensor))

    @classmethod
    def another(
        cls, tensor: torch.Tensor, value: SavedValue, lease: Lease, segment: int, ordinal: int, shell: Shell | None
    ) -> SavedHandle:
        """A handle of another view of a value."""
        version = version_of(tensor)
        if value.decision is Decision.KEEP:
            return cls(detached_alias(tensor), version, None, value, lease, segment, ordinal, shell=shell)
        return cls(version_probe(tensor), version, Geometry.of(tensor), value, lease, segment, ordinal, shell=shell)

    def given_back(self, resident: Callable[[SavedValue], torch.UntypedStorage]) -> torch.Tensor:
        """The tensor for autograd; ``resident`` returns the filled storage of a value that may have left the device."""
        value, found = self.value, self.tensor
        if value is None:
            self.check_version()
            return found
        if version_of(found) != self.version:  # engine rule 5
            self.check_version()
        geometry, shell = self.geometry, self.shell
        if geometry is not None:
            found = counted_by(found, geometry.on(resident(value)))  # engine rules 5 and 6
        return found if shell is None else shell.around(found)  # engine rule 13

    def check_version(self) -> None:
        """Raises autograd's error if a saved tensor was written in place since it was saved (engine rule 5)."""
        if not self.tensor.is_inference():
            check_unwritten(self.tensor, self.version, "a saved tensor")


CLASSES = SavedValue, SavedHandle, geometry, tuple(Decision), tuple(ValueState)
"""What ``native/planned_hooks.h`` makes and compares with: the order of these members is known there."""
