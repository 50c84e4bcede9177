"""The tensors of the model itself, which the engine never touches (engine rule 2)."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from poochplan.runtime.replays.tape import Tape
from poochplan.tensors.storages import gradient_of, has_storage, keys_of, plain_storage, storage_key
from poochplan.torch_private.sharding import gathered_weights, has_storages
from poochplan.torch_private.tensor_internals import storage_identity, version_of


class OwnTensors:
    """State: the model's parameters and buffers, which ``tape.static`` and ``tape.buffers`` have by storage."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages of ``tape.static``, by identity: another may get that of a buffer that a forward replaces."""
        self.absent: list[Any] = []
        """FSDP2's weights that have no storages yet."""

    def have_come(self) -> bool:
        """Whether weights have storages now that had none: in the first forward of their unit."""
        return any(map(has_storages, self.absent))

    def has_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of the parameters. One may get other ``.data`` amid forward."""
        return id(tensor) in self._tape.own_ids and isinstance(tensor, torch.nn.Parameter)

    def look_at(self, model: torch.nn.Module) -> int:
        """Finds them anew. Returns the bytes of their gradients."""
        kind, static, before, self._alive = self._tape.device_type, self._tape.static, self._alive, {}
        gradient_bytes, others = self._tape.look_at(model)
        for tensor in others:
            storage = plain_storage(tensor, kind)
            if storage is not None:
                key = storage_identity(storage)
                if tensor.ndim < 2 or not isinstance(tensor, torch.nn.Parameter):
                    self._tape.buffers.add(key)
                static[key] = max(version_of(tensor), static.get(key, 0))
                reference = before.get(key)
                if reference is None or reference() is not storage:
                    reference = weakref.ref(storage, partial(static.pop, key))  # its default is the reference
                self._alive[key] = reference
            else:
                static.update(dict.fromkeys(keys_of(tensor, kind), 0))
            grad = gradient_of(tensor)
            if grad is not None and has_storage(grad, kind):
                gradient_bytes += grad.untyped_storage().nbytes()
        gathered, self.absent = gathered_weights(model)
        static.update((storage_key(one), version_of(one)) for one in gathered if one.device.type == kind)
        return gradient_bytes
