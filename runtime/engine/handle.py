"""Handle: what autograd holds for one pack of a saved value."""

from __future__ import annotations

import msgspec
import torch

from poochplan.formats.plan import Decision
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.torch_private.tensor_internals import detached_alias, version_of

from .saved_value import SavedValue


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
