"""Optimizers: which of them step parameters independently, and which tensors of their state may leave the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from poochplan.torch_private.tensor_internals import holders_of, private_device_type, storage_identity, tensors_in

from .storages import plain_storage, stands_for_memory

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What a caller names: one, several or none."""
LEAST_STATE_BYTES = 64 * 1024
"""Smaller tensors stay on the device: they are many, and together they take little memory."""

_SEPARABLE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adafactor,
    }
)
"""These step each parameter by its own gradient and state alone."""


def listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Those that really step, of some that a library (accelerate, Lightning) may have wrapped."""
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or []
    return [inner_of(one) for one in given]


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that really steps, of one that a library (accelerate, Lightning) has wrapped."""
    wrapped = getattr(optimizer, "optimizer", None)
    return inner_of(wrapped) if isinstance(wrapped, torch.optim.Optimizer) else optimizer


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of some parameters after the others have the bits of one step of all.

    It is one of torch's classes, and neither a subclass nor a class whose ``step`` somebody has replaced.
    """
    return type(optimizer) in _SEPARABLE and all(map(_is_torchs, _layers_of(type(optimizer).step)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def movable_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter's state that may leave the device between steps, or have left it, each once.

    They are on the parameter's device, whose type is one of torch's own, and large, and no other tensor has their
    memory. Of fake tensors this last is not asked, because torch's caches hold their storages too.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(optimizer.state.get(parameter, {})):
        storage = _own_storage(tensor, parameter)
        if storage is not None:
            found.setdefault(storage_identity(storage), tensor)
    return list(found.values())


_AWAY: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""The state tensors whose memory is in the host tier, by identity, and where that is."""


def is_away(tensor: torch.Tensor) -> bool:
    """Whether a state tensor's memory is in the host tier of a session."""
    known = _AWAY.get(id(tensor))
    return known is not None and known[0]() is tensor and known[1] == tensor.data_ptr()


def goes_away(tensor: torch.Tensor) -> None:
    """Its memory is in the host tier from now on."""
    key = id(tensor)

    def died(known: weakref.ref[torch.Tensor]) -> None:
        if key in _AWAY and _AWAY[key][0] is known:
            del _AWAY[key]

    _AWAY[key] = weakref.ref(tensor, died), tensor.data_ptr()


def is_back(tensor: torch.Tensor) -> None:
    """Its memory is on the device again."""
    _AWAY.pop(id(tensor), None)


_HOLDERS = 2
"""A tensor, and the Python object of its storage."""


def _own_storage(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that may leave the device, or has left it; None if it may not."""
    if is_away(tensor):
        return tensor.untyped_storage()
    if tensor.device != parameter.device or tensor.requires_grad or tensor is parameter.grad:
        return None
    if tensor.device.type == private_device_type():
        return None
    storage = plain_storage(tensor, tensor.device.type)
    if storage is None or storage.nbytes() < LEAST_STATE_BYTES:
        return None
    if tensor.storage_offset() or storage.nbytes() != tensor.numel() * tensor.element_size():
        return None
    return storage if stands_for_memory(tensor) or holders_of(storage) == _HOLDERS else None


def _layers_of(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function, and what it wraps."""
    found: Callable[..., Any] | None = function
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


def _is_torchs(function: Callable[..., Any]) -> bool:
    """Whether its code is torch's; a wrapper copies the name of what it wraps, but not where its code is."""
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")
