"""Save points: where a compiled forward first has a tensor that backward needs, and hands it to the saved-tensors
hooks, in place of at its end.

The graph-mode partitioner has put an op there. It packs the tensor as autograd would, with the hooks that are on, and
gives a hollow in its place, which the backward's arrival fills. So the forward itself lets go of the tensor behind its
last use, and a plan may have it leave. The compiled code must not reuse the memory of what it has handed out
(``graph_backend.py`` sees to that).
"""

from __future__ import annotations

from functools import partial

import torch

from poochplan.runtime.regions.arrivals import LIBRARY, NAMESPACE, listening, marks, saving
from poochplan.runtime.regions.hollows import hollow_for
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import (
    detached_alias,
    is_dense,
    topmost_hooks,
    unseen_by_modes,
    version_of,
)

OP = "save"
LIBRARY.define(f"{OP}(Tensor value, Tensor? after=None) -> Tensor", tags=(torch.Tag.flexible_layout,))
"""``after`` is what another save point gave, behind which it comes."""


def save(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """A hollow for the tensor, which our hooks have been given; it is held where no hooks are on. Hooks of others get a
    copy when the forward ends: they may do anything with it, and an op must not give what it was given.
    """
    geometry, hooks = Geometry.of(value), topmost_hooks()
    with unseen_by_modes():
        own = detached_alias(value)  # the given one may become a result, which holds the hollow by its node
    with listening():
        if hooks is None:
            return hollow_for(geometry, partial(_held, own, version_of(own)), again=True)
        pack, unpack = hooks
        if not marks(pack):
            return _copy_of(value)
        with saving():
            packed = pack(own)
    return hollow_for(geometry, partial(unpack, packed), again=True)


def _copy_of(value: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, also as a view with gaps: the code behind it relies on the strides."""
    if not value.numel() or is_dense(value):
        return value.clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = value.as_strided((reach,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride(), 0)


def _held(value: torch.Tensor, version: int) -> torch.Tensor:
    """As autograd does, which sees a hollow in its place."""
    if version_of(value) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
            f"tensor of a compiled forward is at version {version_of(value)}; expected version {version} instead"
        )
    return value


def _traced(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The op under fake tensors: what it gives counts as the same memory, so that no later op of the forward writes
    into it. Torch also comes here with a real tensor, behind a hollow, which has no memory.
    """
    if type(value) is torch.Tensor and not value.is_meta:
        return save(value)
    return value.detach()


LIBRARY.impl(OP, save, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{OP}", _traced, lib=LIBRARY)
