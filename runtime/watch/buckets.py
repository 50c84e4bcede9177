"""The buckets of data-parallel training: memory of torch's own that no tensor of Python's shows."""

from __future__ import annotations

import gc

import torch

from poochplan.formats.profile_parts import rounded_up

DataParallel = torch.nn.parallel.DistributedDataParallel


def wrapper_of(model: torch.nn.Module) -> DataParallel | None:
    """The model for data-parallel training that is this one, or that has been put around it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if isinstance(model, DataParallel):
        return model
    return next((one for one in gc.get_objects() if type(one) is DataParallel and one.module is model), None)


def bucket_bytes(model: torch.nn.Module) -> int:
    """What its buckets take: as much as the gradients, where these do not lie in them."""
    wrapper = wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(rounded_up(one.nbytes) for one in wrapper.parameters() if one.requires_grad)
