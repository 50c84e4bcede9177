"""The meter: live bytes of device storages, seen through the dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import last_sequence_number, pytree, storage_identity

from .compiled_regions import CpuRegion, around_backward


class LiveBytesMeter(ToggledMode):
    """Most bytes of device storages live at any moment since :meth:`begin`, each rounded up to ``unit_bytes``.

    A storage that is first met as an argument was there before: it counts from the begin on. Within a compiled region,
    which allocates past the dispatcher, the CPU's allocator tells how much is live.

    Parameters
    ----------
    device_type, unit_bytes: which storages count, and how.
    moment: called at each new peak; what it says of the highest is :attr:`at_peak`.
    """

    def __init__(self, device_type: str, unit_bytes: int, moment: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self._device_type = device_type
        self._unit_bytes = unit_bytes
        self._moment = moment
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0
        self.began_bytes = 0
        """What was live at the begin."""
        self.peak_bytes = 0
        self._region = CpuRegion()
        self._in_region = self._in_backward = False
        self._live_before_bytes = 0
        self.at_peak: Any = None
        self.met: Callable[[torch.UntypedStorage], None] = lambda _: None
        """Told what is first met as an argument."""

    def begin(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        """Begins a new peak at these, which are live now, and at what was met before and is."""
        for key, storage in storages.items():
            self._count_storage(key, storage)
        self.peak_bytes = self.began_bytes = self.live_bytes
        self.at_peak = None

    @property
    def storages(self) -> dict[int, torch.UntypedStorage]:
        """All that are known to be live now."""
        found = {key: reference() for key, reference in self._alive.items()}
        return {key: storage for key, storage in found.items() if storage is not None}

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that was there before."""
        met_bytes = self._count(tensor)
        if met_bytes:
            self.peak_bytes += met_bytes
            self.met(tensor.untyped_storage())

    def around_region(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is to be called in the place of a compiled callable while the meter is on."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            node_before, outputs = last_sequence_number(), None
            self.region_begins()
            try:
                outputs = call(*args, **kwargs)
            finally:
                self.region_ends(pytree.tree_leaves(outputs))
            around_backward(outputs, node_before, lambda _: self.region_begins(), self.region_ends)
            return outputs

        return metered

    def around_backward(self, run: Callable[[], Any], leaves: Iterable[torch.Tensor]) -> Any:
        """What ``run()`` gives, a backward that is metered as one region. The leaves have gradients afterwards."""
        self.region_begins()
        self._in_backward = True
        try:
            return run()
        finally:
            self._in_backward = False
            self.region_ends([leaf.grad for leaf in leaves if leaf.is_leaf])

    def region_begins(self) -> None:
        """A compiled region, or its backward, runs from here."""
        if self._in_backward:
            return
        self._in_region, self._live_before_bytes = True, self.live_bytes
        if self._device_type == "cpu":
            self._region.begin()

    def saved(self, tensor: torch.Tensor) -> None:
        """Counts what is saved within a compiled region."""
        if self._in_region:
            self._count(tensor)

    def region_ends(self, leaves: list[Any]) -> None:
        """The region has returned ``leaves``."""
        if self._in_backward:
            return
        taken_bytes = self._region.end()
        self._in_region = False
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        most_bytes = self._live_before_bytes + taken_bytes if taken_bytes is not None else 0
        self._reaches(max(self.live_bytes, most_bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        born_here = func is torch.ops.aten.lift_fresh.default  # ``torch.tensor``: the first that a mode sees of it
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                if born_here or self._in_region:
                    self._count(leaf)
                else:
                    self.watch(leaf)
        outputs = func(*args, **kwargs)
        if born_here or not traits(func).pure_view:
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor):
                    self._count(leaf)
            self._reaches(self.live_bytes)
        return outputs

    def _reaches(self, size_bytes: int) -> None:
        if size_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = size_bytes, self._moment()

    def _count(self, tensor: torch.Tensor) -> int:
        if not has_storage(tensor, self._device_type):
            return 0
        storage = tensor.untyped_storage()
        return self._count_storage(storage_identity(storage), storage)

    def _count_storage(self, key: int, storage: torch.UntypedStorage) -> int:
        if key in self._alive:
            return 0
        size_bytes = -(-storage.nbytes() // self._unit_bytes) * self._unit_bytes
        self._alive[key] = weakref.ref(storage, lambda _: self._died(key, size_bytes))
        self.live_bytes += size_bytes
        return size_bytes

    def _died(self, key: int, size_bytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size_bytes
            self._region.freed(size_bytes)
