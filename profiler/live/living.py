"""Which tensors are alive, as far as Python's garbage collector knows them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import torch

from poochplan.tensors.storages import has_storage
from poochplan.tensors.torch_private import storage_identity


def live_tensors(device_type: str) -> Iterator[torch.Tensor]:
    """One tensor for each storage on that device, the largest first, of the tensors that Python objects are.

    Not those that only C++ holds (autograd's own, buckets of data-parallel training), nor storages without a tensor.
    """
    found: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and has_storage(one, device_type):
                found.setdefault(storage_identity(one.untyped_storage()), one)
    yield from sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
