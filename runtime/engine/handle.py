"""Handle: what autograd holds for one pack of a saved value."""

from __future__ import annotations

import torch

from poochplan.formats.plan import Decision
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.tensors.torch_private import version_of

from .saved_value import SavedValue


class Lease:
    """Held by each handle on a saved value: it dies with the last of them, whatever interrupts their making or end."""

    __slots__ = ("__weakref__",)


class Handle:
    """One pack. ``value`` is None for what the engine does not touch; ``segment`` is the number of its segment."""

    __slots__ = ("geometry", "lease", "ordinal", "segment", "tensor", "used", "value", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        value: SavedValue | None = None,
        lease: Lease | None = None,
        segment: int = 0,
        ordinal: int = -1,
    ) -> None:
        self.value = value
        self.lease = lease
        self.ordinal = ordinal
        self.segment = segment
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
