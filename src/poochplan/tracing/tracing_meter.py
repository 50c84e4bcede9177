"""The meter of a traced step: its ops and live bytes of device storages, seen through the dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from poochplan.formats.profile_parts import rounded_up
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.report.inspection.step_trace import COMPUTE
from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity

from .step_log import StepLog


class TracingMeter(ToggledMode):
    """Tells a log each op that takes time, with its layer, and live bytes whenever they change: those of device
    storages, each rounded up to what is allocated at once. State: these storages.

    A storage that is first met as an argument was there before. For steps whose gradients nobody uses: under a mode
    autograd takes other formulas.
    """

    def __init__(self, device_type: str, log: StepLog, tracker: LayerTracker) -> None:
        super().__init__()
        self._device_type, self._log, self._tracker = device_type, log, tracker
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
        kwargs, facts = kwargs or {}, traits(func)
        is_told = self._log.is_on and not facts.pure_view
        begin = self._log.clock.mark() if is_told else None
        self._watch_all((args, kwargs))
        outputs = func(*args, **kwargs)
        if not facts.pure_view:
            self._watch_all(outputs)
        if is_told:
            self._log.took(COMPUTE, facts.name, self._tracker.current(), begin, self._log.clock.mark())
            self._log.live(self.live_bytes)
        return outputs

    def compiled(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """One bar for a compiled callable, inside of which there are no ops."""

        def region(*args: Any, **kwargs: Any) -> Any:
            with self.away(), self._log.block(COMPUTE, "compiled region", path):
                return call(*args, **kwargs)

        return region

    def _watch_all(self, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)

    def _died(self, key: int, size_bytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size_bytes
            self._log.live(self.live_bytes)
