"""Hollows: what stands in compiled code for a saved tensor until it arrives.

A hollow lies as the saved tensor does, on torch's device without memory. The table says how the real one is had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from poochplan.errors import StepError
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import storage_identity, unseen_by_modes


class _Hollow:
    """What one hollow tensor waits for; held by the table, until the hollow arrives or dies."""

    __slots__ = ("again", "unpack", "watch")

    def __init__(
        self, storage: torch.UntypedStorage, key: int, unpack: Callable[[], torch.Tensor], again: bool
    ) -> None:
        self.unpack, self.again = unpack, again
        self.watch = weakref.ref(storage, lambda _: _HOLLOWS.pop(key, None))


_HOLLOWS: dict[int, _Hollow] = {}
"""By the identity of the hollow's storage, which autograd leaves as it is where it makes tensors anew."""


def hollow_for(geometry: Geometry, unpack: Callable[[], torch.Tensor], *, again: bool = False) -> torch.Tensor:
    """A hollow of that geometry, for which ``unpack`` gives the tensor; ``again``: each time, not once."""
    with unseen_by_modes():
        hollow = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype, device="meta")
    storage = hollow.untyped_storage()
    key = storage_identity(storage)
    _HOLLOWS[key] = _Hollow(storage, key, unpack, again)
    return hollow


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether it stands for a tensor that has not arrived for good."""
    return bool(_HOLLOWS) and tensor.is_meta and storage_identity(tensor.untyped_storage()) in _HOLLOWS


def filled(tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """What gives the tensor that a hollow stands for; None for any other tensor.

    Raises ``StepError`` for one whose tensor has arrived before, or is nobody's: compiled code would read no memory.
    """
    if not tensor.is_meta:
        return None
    key = storage_identity(tensor.untyped_storage())
    found = _HOLLOWS.get(key)
    if found is None:
        raise StepError(
            "expected a saved tensor to arrive in a compiled backward once, found that it is gone; "
            "hooks of your own around saved tensors must hand back what they were given"
        )
    if not found.again:
        del _HOLLOWS[key]
    return found.unpack


def waiting() -> int:
    """How many hollows have been handed out and neither arrived for good nor died."""
    return len(_HOLLOWS)
