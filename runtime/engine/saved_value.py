"""SavedValue: one value in the engine's hands. Handle: what autograd holds for one pack of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision
from poochplan.runtime.devices.device import Stream
from poochplan.runtime.devices.transfers import Copy
from poochplan.runtime.replays.recorder import StorageRecord
from poochplan.runtime.replays.replay import Recipe
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.tensors.torch_private import version_of

if TYPE_CHECKING:
    from .engine import Engine


class SavedValue:
    """A saved value. Lives as long as a handle or a recipe refers to it.

    States, by what it holds: *resident* (``storage``, no ``in_copy``), *leaving* (``storage`` and ``out_copy``), *on
    the host* (``host_offset`` alone), *arriving* (``storage`` and ``in_copy``), *to be replayed* (``recipe`` alone).
    """

    __slots__ = (
        "__weakref__",
        "decision",
        "device_type",
        "generation",
        "geometry",
        "home",
        "host_offset",
        "in_copy",
        "index",
        "name",
        "out_copy",
        "probe",
        "recipe",
        "record",
        "size_bytes",
        "storage",
        "version",
    )

    def __init__(self, index: int | None, decision: Decision, record: StorageRecord, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        """Its save point, or None outside the plan."""
        self.name = "a saved value"
        self.decision = decision
        self.record = record
        self.generation = len(record.writes)
        self.probe = version_probe(tensor)
        self.version = version_of(tensor)
        self.geometry = Geometry.of(tensor)
        self.device_type = tensor.device.type
        self.size_bytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.home: Stream | None = None
        """The compute stream on which ``storage`` was saved or came back."""
        self.host_offset = -1
        self.out_copy: Copy | None = None
        self.in_copy: Copy | None = None
        self.recipe: Recipe | None = None

    @property
    def unwritten(self) -> bool:
        """Whether its version counter says that nobody has written it since it was saved."""
        return version_of(self.probe) == self.version

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether a later pack of the same storage is of this same content.

        The profile knows that nobody wrote between the packs of a planned value. Without a plan only the very same part
        of the storage counts: chunks with version counters of their own may have been written unseen.
        """
        return self.unwritten and (self.index is not None or self.geometry == Geometry.of(tensor))

    @property
    def waits_for_replay(self) -> bool:
        return self.storage is None and self.recipe is not None

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """A replay has rebuilt it: the recipe, and all it claimed, goes."""
        if storage.nbytes() != self.size_bytes:
            raise RuntimeError(f"a replay gave {storage.nbytes()} bytes where {self.size_bytes} were saved")
        self.storage = storage
        self.recipe = None

    def arrived(self) -> float:
        """Waits for the copy that fills it, if any; seconds waited. Raises ``SpillError`` when the read failed."""
        if self.in_copy is None:
            return 0.0
        waited_s = self.in_copy.wait()
        error = self.in_copy.error
        if error is not None:
            self.storage = None  # first: without its copy it would count as filled
            self.in_copy = None
            raise SpillError(
                f"a saved value of {self.size_bytes} bytes could not be read back from the host tier "
                f"({error.strerror}); this step's gradients are lost, check the disk"
            ) from error
        self.in_copy = None
        return waited_s


class Lease:
    """Held by each handle on a saved value: it dies with the last of them, whatever interrupts their making or end."""

    __slots__ = ("__weakref__",)


class Handle:
    """One pack. ``value`` is None for what the engine does not touch; ``step`` counts the engine's steps."""

    __slots__ = ("engine", "geometry", "lease", "ordinal", "step", "tensor", "used", "value", "version")

    def __init__(self, engine: Engine, value: SavedValue | None, tensor: torch.Tensor, ordinal: int = -1) -> None:
        self.engine = engine
        self.value = value
        self.lease = engine.lease() if value is not None else None
        self.ordinal = ordinal
        self.step = engine.step
        self.used = False
        self.version = 0 if tensor.is_inference() else version_of(tensor)
        self.geometry: Geometry | None = None
        if value is None or value.decision is Decision.KEEP:
            self.tensor = tensor.detach()  # engine rule 4
        else:
            self.tensor = version_probe(tensor)
            self.geometry = Geometry.of(tensor)

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
