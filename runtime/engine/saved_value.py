"""SavedValue: the life of one value in the engine's hands, as states and the transitions between them. Handle: what
autograd holds for one pack of it.
"""

from __future__ import annotations

from enum import Enum

import msgspec
import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision
from poochplan.runtime.devices.device import Stream
from poochplan.runtime.devices.transfers import Copy
from poochplan.runtime.replays.recorded import StorageRecord
from poochplan.runtime.replays.replay import Recipe
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.torch_private.tensor_internals import detached_alias, version_of


class State(Enum):
    """Where a saved value is, and with that which of its fields mean something."""

    ON_DEVICE = "on the device"
    """``storage``; nothing on the host."""
    COPIED = "on the device and on the host"
    """``storage`` and ``out_copy``, which may still be under way."""
    ON_HOST = "on the host"
    """``host_offset``, and ``out_copy``, which has ended."""
    ARRIVING = "on its way back"
    """``storage`` and ``in_copy``, which fills it; on the host as well."""
    TO_REPLAY = "to be replayed"
    """``recipe``."""


_TRANSITIONS = {
    "is_copied": (State.ON_DEVICE,),
    "is_given_up": (State.COPIED, State.ARRIVING),
    "copy_has_failed": (State.COPIED,),
    "is_fetched": (State.ON_HOST,),
    "has_arrived": (State.ARRIVING,),
    "is_dropped": (State.ON_DEVICE,),
    "came_back": (State.TO_REPLAY,),
}
"""What may happen to a value, and in which states."""


class SavedValue(msgspec.Struct, eq=False, weakref=True):
    """A saved value. Lives as long as a handle or a recipe refers to it, or a step policy that awaits another handle.

    Whoever interrupts a transition (Ctrl-C) leaves the old state or the new one: a state that promises a filled
    storage is entered last, one that promises nothing of it first.
    """

    decision: Decision
    record: StorageRecord
    generation: int
    probe: torch.Tensor
    """Shares its version counter; of a value that is kept it is the first handle's tensor as well."""
    version: int
    geometry: Geometry | None
    """How its tensor lies on the storage; None where the probe is that tensor."""
    size_bytes: int
    storage: torch.UntypedStorage | None
    home: Stream | None = None
    """The compute stream on which ``storage`` was saved or came back."""
    index: int | None = None
    """Its save point, or None outside the plan."""
    name: str = "a saved value"
    state: State = State.ON_DEVICE
    host_offset: int = -1
    out_copy: Copy | None = None
    in_copy: Copy | None = None
    recipe: Recipe | None = None

    @classmethod
    def of(cls, decision: Decision, record: StorageRecord, tensor: torch.Tensor, home: Stream | None) -> SavedValue:
        """Of a tensor that is on the device, on whose storage nobody has made one that still stands for it."""
        storage = tensor.untyped_storage()
        if decision is Decision.KEEP:
            probe, geometry = detached_alias(tensor), None
        else:
            probe, geometry = version_probe(tensor), Geometry.of(tensor)
        written, version = len(record.writes), version_of(tensor)
        return cls(decision, record, written, probe, version, geometry, storage.nbytes(), storage, home)

    @property
    def unwritten(self) -> bool:
        """Whether its version counter says that nobody has written it since it was saved."""
        return version_of(self.probe) == self.version

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether a later pack of the same storage is of this same content.

        The profile knows that nobody wrote between the packs of a planned value. Without a plan only the very same part
        of the storage counts: chunks with version counters of their own may have been written unseen.
        """
        if not self.unwritten:
            return False
        return self.index is not None or (self.geometry or Geometry.of(self.probe)) == Geometry.of(tensor)

    @property
    def waits_for_replay(self) -> bool:
        """Whether only a replay brings it back."""
        return self.state is State.TO_REPLAY

    # -- transitions ------------------------------------------------------------------------------------------

    def is_copied(self, copy: Copy, offset: int) -> None:
        """A copy of it to the host has been queued."""
        self.host_offset = offset
        self.out_copy = copy
        self._enter(State.COPIED, "is_copied")

    def is_given_up(self) -> None:
        """Its device storage goes; the host has it."""
        self._enter(State.ON_HOST, "is_given_up")
        self.in_copy = None  # a copy that goes waits
        self.storage = None

    def copy_has_failed(self) -> None:
        """The host does not have it: it stays on the device, for good."""
        self._enter(State.ON_DEVICE, "copy_has_failed")
        self.host_offset, self.out_copy, self.decision = -1, None, Decision.KEEP

    def is_fetched(self, storage: torch.UntypedStorage, home: Stream, copy: Copy) -> None:
        """A copy back, into ``storage``, has been queued."""
        self.home, self.in_copy = home, copy
        self.storage = storage
        self._enter(State.ARRIVING, "is_fetched")

    def arrived(self) -> float:
        """Waits for the copy that fills it, if any; seconds waited. Raises ``SpillError`` when the read failed."""
        if self.in_copy is None or self.state is not State.ARRIVING:
            return 0.0
        waited_s = self.in_copy.wait()
        error = self.in_copy.error
        if error is not None:
            self.is_given_up()
            raise SpillError(
                f"a saved value of {self.size_bytes} bytes could not be read back from the host tier "
                f"({error.strerror}); this step's gradients are lost, check the disk"
            ) from error
        self._enter(State.COPIED, "has_arrived")
        self.in_copy = None
        return waited_s

    def is_dropped(self, recipe: Recipe) -> None:
        """Its device storage goes; the recipe brings it back."""
        self.recipe = recipe
        self._enter(State.TO_REPLAY, "is_dropped")
        self.storage = None

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """A replay has rebuilt it: the recipe, and all it claimed, goes."""
        if storage.nbytes() != self.size_bytes:
            raise RuntimeError(f"a replay gave {storage.nbytes()} bytes where {self.size_bytes} were saved")
        self.storage = storage
        self._enter(State.ON_DEVICE, "came_back")
        self.recipe = None

    def _enter(self, state: State, because: str) -> None:
        assert self.state in _TRANSITIONS[because], f"{because}: not a value that is {self.state.value}"
        self.state = state


class Lease:
    """Held by each handle on a segment's values: it dies with the last one, whatever interrupts their making or end.

    ``whole`` is held by the leases of all segments, and dies with the last of these.
    """

    __slots__ = ("__weakref__", "whole")

    def __init__(self, whole: Lease | None = None) -> None:
        self.whole = whole


class Handle(msgspec.Struct, gc=False, eq=False):
    """One pack. ``value`` is None for what the engine does not touch; ``segment`` is the number of its segment.

    The garbage collector knows of none (``gc=False``): autograd holds them, where it could not see them either.
    """

    tensor: torch.Tensor
    """What is handed back, detached; where there is a ``geometry``, a version probe of it."""
    version: int
    geometry: Geometry | None = None
    value: SavedValue | None = None
    lease: Lease | None = None
    segment: int = 0
    ordinal: int = -1
    used: bool = False

    @classmethod
    def untouched(cls, tensor: torch.Tensor) -> Handle:
        """Of a tensor that the engine leaves alone."""
        return cls(tensor.detach(), 0 if tensor.is_inference() else version_of(tensor))  # engine rule 4

    @classmethod
    def first(cls, value: SavedValue, lease: Lease, segment: int, ordinal: int) -> Handle:
        """Of the tensor that a value was made of, with which it shares what it holds."""
        return cls(value.probe, value.version, value.geometry, value, lease, segment, ordinal)

    @classmethod
    def another(cls, tensor: torch.Tensor, value: SavedValue, lease: Lease, segment: int, ordinal: int) -> Handle:
        """Of another view of a value."""
        version = version_of(tensor)
        if value.decision is Decision.KEEP:
            return cls(detached_alias(tensor), version, None, value, lease, segment, ordinal)
        return cls(version_probe(tensor), version, Geometry.of(tensor), value, lease, segment, ordinal)

    def check_version(self) -> None:
        """Raises what autograd raises when a saved tensor was written in place since it was saved (engine rule 5)."""
        watched = self.tensor
        if watched.is_inference() or version_of(watched) == self.version:
            return
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a saved tensor is at version {version_of(watched)}; expected version {self.version} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
            "with torch.autograd.set_detect_anomaly(True)."
        )
