"""What the capture notes of a step: its ops, its values, and what autograd holds of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poochplan.formats.profile import OpBlock, Phase
from poochplan.tensors.storages import Geometry, storage_key

Shapes = tuple[Any, ...]


def shapes_of(outputs: Any) -> Shapes:
    """Shape of each tensor that an operator returns, in its own nesting; those of nested tensors are left out."""
    if isinstance(outputs, torch.Tensor):
        return () if outputs.is_nested else tuple(outputs.shape)
    return tuple(map(shapes_of, outputs)) if isinstance(outputs, (tuple, list)) else ()


class CapturedOp:
    """One op under way to becoming a ``formats.profile.Op``."""

    __slots__ = (
        "blocks",
        "carried",
        "duration_s",
        "inputs",
        "layer",
        "name",
        "opaque",
        "outputs",
        "overwrites",
        "partly_unwritten",
        "phase",
        "random",
        "shapes",
        "uninitialised",
        "workspace_bytes",
        "writes",
    )

    def __init__(self, name: str, layer: str, phase: Phase) -> None:
        self.name = name
        self.layer = layer
        self.phase = phase
        self.duration_s = 0.0
        self.workspace_bytes = 0
        self.blocks: tuple[OpBlock, ...] = ()
        self.carried: list[tuple[int, CapturedOp]] = []
        """Of a part of a compiled backward: bytes of what it makes, and the later part that lets go of it."""
        self.shapes: Shapes = ()
        """Of what it returns."""
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.writes: list[int] = []
        self.random = False
        self.opaque = False
        self.uninitialised = False
        """Bears storages that nobody has written yet."""
        self.partly_unwritten: list[int] = []
        """Those of its outputs that it does not write whole."""
        self.overwrites: int | None = None
        """The value whose every byte it writes without reading one."""


class CapturedValue:
    """One storage. Ticks are None while it lives."""

    __slots__ = (
        "born",
        "died",
        "dtype",
        "key",
        "layer",
        "let_go",
        "packed_version",
        "pinned_because",
        "shape",
        "size_bytes",
    )

    def __init__(self, tensor: torch.Tensor, layer: str, born: int) -> None:
        self.size_bytes = tensor.untyped_storage().nbytes()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self.layer = layer
        self.born = born
        self.key = storage_key(tensor)
        self.died: int | None = None
        """Tick of forward death."""
        self.let_go: int | None = None
        """Tick at which the last handle died; None while one lives, or when there was none."""
        self.packed_version: int | None = None
        self.pinned_because = ""


class CapturedHandle:
    """What autograd holds in capture: the clone's view, and whose handle this is. ``died(value)`` is told its end."""

    __slots__ = ("died", "geometry", "holder", "ordinal", "used", "value")

    def __init__(
        self, value: int, ordinal: int, geometry: Geometry, holder: Clone, died: Callable[[int], None]
    ) -> None:
        self.value = value
        self.ordinal = ordinal
        self.geometry = geometry
        self.holder = holder
        self.died = died
        self.used = False

    def __del__(self) -> None:
        self.died(self.value)


class Clone:
    """The copy of a saved value that backward runs on; shared by the value's handles."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self.storage = storage
