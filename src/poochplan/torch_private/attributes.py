"""Attributes: what user code has set on a tensor (``weight.main_grad``) comes back with the saved tensor.

Only Python code reads them, in the backward of a ``torch.autograd.Function``. While saved-tensors hooks are on, torch
gives it a new tensor. So ``ctx.saved_tensors`` puts on that what the saved tensor has now: without hooks both are one.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch
from torch.autograd.function import BackwardCFunction, Function

PackedT = TypeVar("PackedT")


class _Saved(msgspec.Struct, gc=False, eq=False):
    """What a pack hook has returned for a tensor that a function saved."""

    packed: Any
    attributes: dict[str, Any] | None
    """The tensor's own, which may get more; None for those that torch does not bring back without hooks either."""
    leaf: weakref.ref[torch.Tensor] | None
    """The tensor itself, if backward without hooks gets that. No memory is held by it."""


class _Here(threading.local):
    returned: list[_Saved] | None = None
    """What unpack hooks have returned in the call of ``saved_tensors`` that this thread is in."""


_here = _Here()
_APPLY: Any = Function.apply.__code__
_ORDINARY = torch.Tensor, torch.nn.Parameter


def with_attributes(
    pack: Callable[[torch.Tensor], PackedT], unpack: Callable[[PackedT], torch.Tensor]
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """The same hooks; attributes of tensors come back with them."""
    _watch_saved_tensors()

    # No local has a handle or a frame: the traceback of an error that was caught inside would keep them.

    @functools.wraps(pack)
    def packed(tensor: torch.Tensor) -> Any:
        if sys._getframe(1).f_code is not _APPLY or type(tensor) not in _ORDINARY:
            return pack(tensor)
        return _Saved(pack(tensor), *_of(tensor, sys._getframe(1).f_locals))

    @functools.wraps(unpack)
    def unpacked(found: Any) -> torch.Tensor:
        if type(found) is not _Saved:
            return unpack(found)
        if _here.returned is not None:
            _here.returned.append(found)
        return unpack(found.packed)

    return packed, unpacked


def _of(
    tensor: torch.Tensor, call: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, weakref.ref[torch.Tensor] | None]:
    """The tensor's attributes, and the tensor itself if it is a leaf; ``call``: the locals of ``Function.apply``."""
    if tensor.grad_fn is not None and _is_result(tensor, **call):
        return None, None
    return tensor.__dict__, weakref.ref(tensor) if tensor.requires_grad and tensor.is_leaf else None


def _is_result(tensor: torch.Tensor, cls: Any, args: tuple[Any, ...], **_: Any) -> bool:
    """Whether the function ``cls`` that is called with ``args`` has made the tensor. Its attributes might refer to the
    graph, which would hold itself alive.
    """
    return getattr(tensor.grad_fn, "_forward_cls", None) is cls and not any(tensor is one for one in args)


@functools.cache
def _watch_saved_tensors() -> None:
    """From the first hooks of this process on, for graphs outlive hooks."""
    node_class: Any = BackwardCFunction
    read: Any = node_class.saved_tensors

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

    node_class.saved_tensors = property(saved_tensors, doc=read.__doc__)


def _as_saved(node: Any, tensor: torch.Tensor, saved: _Saved) -> torch.Tensor:
    leaf = saved.leaf() if saved.leaf is not None else None
    if leaf is not None:
        return leaf
    if saved.attributes is None or tensor.grad_fn is node:  # a result, perhaps written in place
        return tensor
    if type(tensor) in _ORDINARY and tensor.__dict__ is not saved.attributes:
        tensor.__dict__ = saved.attributes
    return tensor
