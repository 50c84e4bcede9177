"""A meter of live tensor bytes that shares no code with the package: by data pointer, through the dispatcher."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak`` is the most bytes of CPU storages that were alive at once since ``restart``."""

    sees_poochplan = True

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self.live = 0
        self.peak = 0
        for tensor in before:
            self._see(tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def restart(self) -> None:
        self.peak = self.live

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or pointer in self._sizes:
            return
        self._sizes[pointer] = size
        self.live += size
        self._references[pointer] = weakref.ref(storage, lambda _: self._gone(pointer))
        self.peak = max(self.peak, self.live)

    def _gone(self, pointer: int) -> None:
        self.live -= self._sizes.pop(pointer)
        del self._references[pointer]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
                self._see(leaf)
        return result


def outside_meter() -> LiveBytes:
    """To be entered around a whole loop and its session: what is there then, and all that the dispatcher makes from
    then on. It sees what the package moves.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        before = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return LiveBytes(*(one for one in before if one.layout is torch.strided and one.device.type == "cpu"))


def peak_of_a_step(
    model: torch.nn.Module,
    step: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: bool = False,
    before: Callable[[], object] = lambda: None,
) -> int:
    """Most bytes live in the third of three training steps; ``before`` runs before each, unmetered."""
    loss = None
    with LiveBytes(*model.parameters(), *model.buffers()) as meter:
        for _ in range(3):
            before()
            if not accumulate:
                model.zero_grad(set_to_none=True)
            meter.restart()
            loss = step()
            loss.backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()
    return meter.peak
