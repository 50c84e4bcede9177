"""ClonedCapture: a capture with hooks of its own, in which backward runs on clones of what was saved.

Memory during capture is about that of the in-core step: of each saved value the clone is there, the original dies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from poochplan.errors import StepError
from poochplan.formats.profile import Phase
from poochplan.profiler.step.forward_only import CALLS_BACKWARD
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.runtime.compiled.deferred_unpack import deferring
from poochplan.tensors.modes import uncompiled_hooks
from poochplan.tensors.storages import Geometry

from .capture import Capture
from .captured import CapturedHandle, Clone


class ClonedCapture(Capture):
    """State: the clones, by value, for as long as a handle holds them."""

    def __init__(self, where: torch.device, tracker: LayerTracker, static: set[int]) -> None:
        super().__init__(where, tracker, static)
        self._clones: dict[int, weakref.ref[Clone]] = {}

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module) -> Iterator[Capture]:
        with (
            uncompiled_hooks(*deferring(self.pack, self.unpack, self.may_wait, model, self.device_type)),
            super().running(model),
        ):
            yield self

    def pack(self, tensor: torch.Tensor) -> CapturedHandle | torch.Tensor:
        if not self.is_moved(tensor):
            self.kept_as_it_is(tensor)
            return tensor.detach()
        number, ordinal, again = self.saved(tensor)
        reference = self._clones.get(number) if again else None
        clone = reference() if reference is not None else None
        if clone is None:
            with self.compiled_calls.set_aside():
                clone = self._cloned(tensor.untyped_storage(), number)
            self._clones[number] = weakref.ref(clone)
        self.lifetimes.holds(number)
        return CapturedHandle(number, ordinal, Geometry.of(tensor), clone, self.lifetimes.let_go)

    def may_wait(self, handle: CapturedHandle | torch.Tensor) -> Geometry | None:
        """How the tensor lies that :meth:`unpack` gives, where a compiled backward may ask for it later; else None."""
        return None if isinstance(handle, torch.Tensor) else handle.geometry

    def unpack(self, handle: CapturedHandle | torch.Tensor) -> torch.Tensor:
        if isinstance(handle, torch.Tensor):
            return handle
        if self.phase is Phase.FORWARD:
            raise StepError(CALLS_BACKWARD)
        if not handle.used:
            handle.used = True
            self.used(handle.ordinal)
        with self.paused():
            with self.compiled_calls.set_aside():
                storage = self._storage_of(handle.holder, handle.value)
            return self._on(storage, handle.geometry)

    def _cloned(self, storage: torch.UntypedStorage, number: int) -> Clone:
        """A copy of the value ``number``, which lies in ``storage``."""
        with self.paused():
            copy = self._copy(storage)
        self.lifetimes.is_copied_to(copy, number)
        return Clone(copy)

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """What is in it, in another one."""
        return storage.clone()

    def _storage_of(self, clone: Clone, number: int) -> torch.UntypedStorage:
        """Where the copy of the value ``number`` is to be read."""
        assert clone.storage is not None
        return clone.storage

    def _on(self, storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
        """A tensor of that geometry on a clone."""
        return geometry.on(storage)
