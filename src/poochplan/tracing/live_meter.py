"""The meter of a traced step: live bytes of device storages, seen through the dispatcher."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from poochplan.formats.profile_parts import rounded_up
from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity


class LiveBytesMeter(ToggledMode):
    """Bytes of device storages that are live now, each rounded up to what is allocated at once. State: these storages.

    A storage that is first met as an argument was there before. For steps whose gradients nobody uses: under a mode
    autograd takes other formulas.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage from now on, once."""
        if not has_storage(tensor, self._device_type):
            return
        storage = tensor.untyped_storage()
        key, size_bytes = storage_identity(storage), rounded_up(storage.nbytes())
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._died(key, size_bytes))
            self.live_bytes += size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._watch_all((args, kwargs))
        outputs = func(*args, **kwargs)
        if not traits(func).pure_view:
            self._watch_all(outputs)
        return outputs

    def _watch_all(self, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)

    def _died(self, key: int, size_bytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size_bytes
