"""What tensors say of themselves while the stand-in is there: their device, and what reads them past the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from poochplan.tensors import storages

from .functional import attend, one_hot
from .memory import is_on_device
from .rules import on_device

if TYPE_CHECKING:
    from .machine import CudaStream, Machine


class _Keys(NamedTuple):
    """A GPU's tensors have other dispatch keys than the host's."""

    of_host: int
    on_device: bool

    def raw_repr(self) -> _Keys:
        return self


def patch(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Puts these in the place of the methods of ``torch.Tensor``."""
    here = machine.where
    before = {name: getattr(torch.Tensor, name) for name in ("device", "is_cuda", "to", "tolist", "numpy")}
    storage_clone = torch.UntypedStorage.clone
    storage_device = torch.UntypedStorage.device
    unfused_dropout = torch.nn.functional.dropout
    autocast = torch.amp.autocast_mode.autocast.__init__

    def device(tensor: torch.Tensor) -> torch.device:
        return here if on_device(tensor) else before["device"].__get__(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        memory_format = kwargs.get("memory_format")
        where, dtype, non_blocking, parsed_format = torch._C._nn._parse_to(*args, **kwargs)
        memory_format = parsed_format or memory_format or torch.preserve_format
        where = tensor.device if where is None else where
        if where.type == tensor.device.type and where.type != "cuda":
            return before["to"](tensor, *args, copy=copy, **kwargs)
        dtype = dtype or tensor.dtype
        if where.type == tensor.device.type and dtype == tensor.dtype and not copy:
            same = memory_format is torch.preserve_format or tensor.is_contiguous(memory_format=memory_format)
            if same:
                return tensor
        if where.type == "cuda":
            machine.is_asked(where, "a tensor was moved to the memory")
            where = here
        return torch.ops.aten._to_copy.default(
            tensor, dtype=dtype, device=where, non_blocking=non_blocking, memory_format=memory_format
        )

    def tolist(tensor: torch.Tensor) -> Any:
        return before["tolist"](to(tensor, "cpu"))

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if on_device(tensor) and not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return before["numpy"](to(tensor, "cpu"), force=force)

    def record_stream(tensor: torch.Tensor, stream: CudaStream) -> None:
        block = machine.memory.block_at(tensor.untyped_storage().data_ptr())
        if block is not None and block.stream is not stream._stream:
            block.recorded.add(stream._stream)

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not is_on_device(storage):
            return storage_clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=here).set_(storage).clone().untyped_storage()

    def enter_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """A GPU's: one op makes the result, and a mask of bools."""
        if inplace or not (tensor.device.type == "cuda" and training and 0 < p < 1 and tensor.numel()):
            return unfused_dropout(tensor, p, training, inplace)
        return torch.native_dropout(tensor, p, True)[0]

    found = {
        "device": property(device),
        "is_cuda": property(on_device),
        "to": to,
        "cuda": lambda tensor, device=None, **options: to(tensor, torch.device("cuda") if device is None else device),
        "cpu": lambda tensor: to(tensor, "cpu"),
        "get_device": lambda tensor: machine.index if on_device(tensor) else -1,
        "tolist": tolist,
        "numpy": numpy,
        "record_stream": record_stream,
        "is_pinned": lambda tensor, *_: machine.host_memory.is_pinned(tensor.data_ptr()),
    }
    for name, thing in found.items():
        patch.setattr(torch.Tensor, name, thing)
    where = property(lambda storage: here if is_on_device(storage) else storage_device.__get__(storage))
    patch.setattr(torch.UntypedStorage, "device", where)
    patch.setattr(torch.UntypedStorage, "__repr__", lambda storage: f"<{storage.nbytes()} bytes on {storage.device}>")
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    patch.setattr(torch.nn.functional, "one_hot", one_hot)
    patch.setattr(torch.nn.functional, "dropout", dropout)
    patch.setattr(torch.UntypedStorage, "clone", clone)
    keys = storages.dispatch_keys
    patch.setattr(storages, "dispatch_keys", lambda tensor: _Keys(keys(tensor).raw_repr(), on_device(tensor)))
    patch.setattr(torch.amp.autocast_mode.autocast, "__init__", enter_autocast)
