"""Attributes: what user code has set on a tensor (``weight.main_grad``) comes back with the saved tensor.

Only Python code reads them, in the backward of a ``torch.autograd.Function``. While saved-tensors hooks are on, torch
gives it a new tensor. So ``ctx.saved_tensors`` puts on that what the saved tensor has now: without hooks both are one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

PackedT = TypeVar("PackedT")
Saving = dict[int, tuple[weakref.ref[torch.Tensor], int]]
"""By identity, tensors and the identity of the node that has saved each last."""


class _Saved(msgspec.Struct, gc=False, eq=False):
    """What a pack hook has returned for a tensor that a function saved."""

    packed: Any
    attributes: dict[str, Any] | None
    """The tensor's own, which may get more; None for those that torch does not bring back without hooks either."""
    leaf: weakref.ref[torch.Tensor] | None
    """The tensor itself, if backward without hooks gets that. No memory is held by it."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.returned: list[_Saved] | None = None
        """What unpack hooks have returned in the call of ``saved_tensors`` that this thread is in."""
        self.saving: Saving = {}
        """The living tensors that functions save, or have saved: torch packs them once forward returns."""


_here = _Here()
_ORDINARY = torch.Tensor, torch.nn.Parameter


def with_attributes(
    pack: Callable[[torch.Tensor], PackedT], unpack: Callable[[PackedT], torch.Tensor]
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """The same hooks; attributes of tensors come back with them."""
    _watch_functions()

    # No local has a handle: the traceback of an error that was caught inside would keep it.

    @functools.wraps(pack)
    def packed(tensor: torch.Tensor) -> Any:
        saving = _here.saving.get(id(tensor)) if _here.saving else None
        if saving is None or saving[0]() is not tensor:
            return pack(tensor)
        return _Saved(pack(tensor), *_of(tensor, saving[1]))

    @functools.wraps(unpack)
    def unpacked(found: Any) -> torch.Tensor:
        if type(found) is not _Saved:
            return unpack(found)
        if _here.returned is not None:
            _here.returned.append(found)
        return unpack(found.packed)

    return packed, unpacked


def saving_here() -> Saving:
    """The living tensors of this thread whose attributes come back: those that functions have saved."""
    return _here.saving


def _of(tensor: torch.Tensor, node: int) -> tuple[dict[str, Any] | None, weakref.ref[torch.Tensor] | None]:
    """The tensor's attributes, and the tensor itself if it is a leaf; it is saved by the node of that identity."""
    # Attributes of what the function itself has made might refer to the graph, which would hold itself alive.
    if tensor.grad_fn is not None and id(tensor.grad_fn) == node:
        return None, None
    return tensor.__dict__, weakref.ref(tensor) if tensor.requires_grad and tensor.is_leaf else None


@functools.cache
def _watch_functions() -> None:
    """From the first hooks of this process on, for graphs outlive hooks."""
    node_class: Any = BackwardCFunction
    context_class: Any = FunctionCtx
    read: Any = node_class.saved_tensors
    save: Any = context_class.save_for_backward

    def saved_tensors(node: Any) -> Any:
        before, _here.returned = _here.returned, []
        try:
            found, returned = read.__get__(node), _here.returned
        finally:
            _here.returned = before
        if not returned or len(returned) != sum(tensor is not None for tensor in found):
            return found
        each = iter(returned)
        return tuple(None if tensor is None else _as_saved(node, tensor, next(each)) for tensor in found)

    @functools.wraps(save)
    def save_for_backward(node: Any, *tensors: torch.Tensor) -> None:
        save(node, *tensors)
        saving = _here.saving
        for one in tensors:
            if type(one) in _ORDINARY:
                saving[id(one)] = weakref.ref(one, functools.partial(_forget, saving, id(one))), id(node)

    node_class.saved_tensors = property(saved_tensors, doc=read.__doc__)
    context_class.save_for_backward = save_for_backward


def _forget(saving: Saving, key: int, _: object) -> None:
    saving.pop(key, None)


def _as_saved(node: Any, tensor: torch.Tensor, saved: _Saved) -> torch.Tensor:
    leaf = saved.leaf() if saved.leaf is not None else None
    if leaf is not None:
        return leaf
    if saved.attributes is None or tensor.grad_fn is node:  # a result, perhaps written in place
        return tensor
    if type(tensor) in _ORDINARY and tensor.__dict__ is not saved.attributes:
        tensor.__dict__ = saved.attributes
    return tensor
