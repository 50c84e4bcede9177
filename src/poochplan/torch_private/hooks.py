"""Private names of torch's saved-tensors hooks: which lie on top, and where code needs a thread without them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Pack and unpack."""


def as_given(*hooks: Any) -> Any:
    """The hooks themselves."""
    return hooks


def has_topmost_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """Whether these are the topmost saved-tensors hooks, which torch removes when any hooks end."""
    topmost = topmost_hooks()
    return topmost is not None and topmost[0] is hooks.pack_hook


def topmost_hooks() -> Hooks | None:
    """The pack and unpack that autograd would call on this thread; None if there are none."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


@contextlib.contextmanager
def stand_aside(hooks: torch.autograd.graph.saved_tensors_hooks) -> Iterator[None]:
    """A block in which these hooks are off where code requires a thread without hooks, as ``torch.func.grad`` and
    ``torch.autograd.graph.disable_saved_tensors_hooks`` do.

    Torch would raise otherwise. Autograd keeps the tensors that are saved there. The C functions are replaced, because
    a decorator may have been made of the Python one before.
    """
    with _ASIDE_LOCK:
        _ASIDE.append(hooks)
        hooks_of_torch: Any = torch._C._autograd
        hooks_of_torch._saved_tensors_hooks_disable = _disable_others
        hooks_of_torch._saved_tensors_hooks_enable = _enable_ours
    try:
        yield
    finally:
        with _ASIDE_LOCK:
            _ASIDE.remove(hooks)
            if not _ASIDE:
                torch._C._autograd._saved_tensors_hooks_disable = _DISABLE
                torch._C._autograd._saved_tensors_hooks_enable = _ENABLE


def _disable_others(message: str, *more: Any) -> None:
    topmost = topmost_hooks()
    if topmost is None or not any(topmost[0] is one.pack_hook for one in _ASIDE):
        _DISABLE(message, *more)
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        _DISABLE(message, *more)
    except RuntimeError:  # the user's hooks lie below
        torch._C._autograd._push_saved_tensors_default_hooks(*topmost)
        raise
    _off.hooks = topmost


def _enable_ours() -> None:
    _ENABLE()
    topmost, _off.hooks = _off.hooks, None
    if topmost is not None and any(topmost[0] is one.pack_hook for one in _ASIDE):
        torch._C._autograd._push_saved_tensors_default_hooks(*topmost)


class _Off(threading.local):
    hooks: Hooks | None = None
    """Of :func:`stand_aside`, while this thread must have none."""


_off = _Off()
_ASIDE: list[torch.autograd.graph.saved_tensors_hooks] = []
_ASIDE_LOCK = threading.Lock()
_DISABLE: Callable[..., None] = torch._C._autograd._saved_tensors_hooks_disable
_ENABLE: Callable[[], None] = torch._C._autograd._saved_tensors_hooks_enable
