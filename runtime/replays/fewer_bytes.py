"""Indices and casts: a saved value of which fewer bytes of each element hold all, kept and widened again.

What made a value decides, and never its contents. Indices are results of recorded ops, which a size of what these read
bounds: they fit into 1, 2 or 4 bytes. A recorded cast makes float32 of bfloat16 whose bits are the upper halves. Halves
are cut off as integers, so that each payload of a NaN stays, and widened by a cast, as they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from poochplan.formats.forms import HALF, INTEGERS
from poochplan.tensors.operators import unflatten
from poochplan.tensors.storages import new_storage, on_whole
from poochplan.torch_private.tensor_internals import CASTING

from .replay import RecordedOp, StorageRecord, View

PART = 1 << 16
"""Elements that are narrowed or widened at a time on the CPU."""
POOLING: dict[Any, int] = {
    torch.ops.aten.max_pool2d_with_indices.default: 2,
    torch.ops.aten.max_pool3d_with_indices.default: 3,
    torch.ops.aten.adaptive_max_pool2d.default: 2,
    torch.ops.aten.adaptive_max_pool3d.default: 3,
}
DILATED = 4
"""The position of the dilation among the arguments of an op of pooling that has one."""


class Choice(NamedTuple):
    """Where an op that chooses along a dimension has its indices and its dimension, which may be left out."""

    result: int
    argument: int
    default: int | None = -1


CHOOSING: dict[Any, Choice] = {
    torch.ops.aten.max.dim: Choice(1, 1),
    torch.ops.aten.min.dim: Choice(1, 1),
    torch.ops.aten.topk.default: Choice(1, 2),
    torch.ops.aten.sort.default: Choice(1, 1),
    torch.ops.aten.sort.stable: Choice(1, 1),
    torch.ops.aten.argmax.default: Choice(0, 1, None),
}
"""The ops of ``formats/forms.py``, with what these know of them."""
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, HALF: torch.bfloat16}
"""The forms, by their names in plans."""


def has_form(record: StorageRecord, dtype: torch.dtype, form: str) -> bool:
    """Whether what has made a storage, which is saved as that ``dtype``, says that this form holds it."""
    birth = record.birth
    if birth is None or record.writes:
        return False
    if form == HALF:
        return dtype is torch.float32 and _is_cast(birth)
    return dtype is torch.int64 and _bound_of(birth, record) <= INTEGERS.get(form, 0)


def _is_cast(birth: RecordedOp) -> bool:
    if birth.func is not CASTING or len(birth.reads) != 1 or birth.reads[0].geometry.dtype is not torch.bfloat16:
        return False
    return unflatten(list(birth.arguments), birth.spec)[1].get("dtype") is torch.float32


def _bound_of(birth: RecordedOp, record: StorageRecord) -> float:
    """All elements of the storage are below it; infinity if the op has another result there."""
    args, kwargs = unflatten(list(birth.arguments), birth.spec)
    dims, choice = POOLING.get(birth.func), CHOOSING.get(birth.func)
    result = choice.result if choice is not None else 1
    is_result = any(one.record is record and one.position == result for one in birth.births)
    if not is_result or not args or not isinstance(args[0], View):
        return float("inf")
    shape = args[0].geometry.shape
    if choice is not None:
        dim = args[choice.argument] if len(args) > choice.argument else kwargs.get("dim", choice.default)
        return prod(shape) if dim is None or not shape else shape[dim]
    if dims is None or len(shape) < dims:
        return float("inf")
    # The window of a result may lie in the padding alone. Its index is then that of its first place inside the bounds
    # that dilation leaves: each coordinate is below the larger of extent and dilation.
    dilations = args[DILATED] if len(args) > DILATED else kwargs.get("dilation", 1)
    return prod(map(max, shape[-dims:], _each(dilations, dims)))


def _each(given: int | Sequence[int], dims: int) -> Sequence[int]:
    given = [given] if isinstance(given, int) else given
    return given if len(given) == dims else [given[0]] * dims


def narrow(storage: torch.UntypedStorage, form: str) -> torch.UntypedStorage | None:
    """The bytes of the storage that the form keeps. None if others matter, which is looked for on the CPU."""
    dtype, whole_bytes = DTYPES[form], 4 if form == HALF else 8
    count = storage.nbytes() // whole_bytes
    made = new_storage(count * dtype.itemsize, storage.device)
    if storage.device.type != "cpu":
        if form == HALF:
            on_whole(made, torch.int16).copy_(on_whole(storage, torch.int16)[1::2])
        else:
            on_whole(made, dtype).copy_(on_whole(storage, torch.int64))
        return made
    if form == HALF:
        halves, into = on_whole(storage, torch.int16).numpy().reshape(-1, 2), on_whole(made, torch.int16).numpy()
        for start in range(0, count, PART):
            part = halves[start : start + PART]
            if np.count_nonzero(part[:, 0]):
                return None
            into[start : start + PART] = part[:, 1]
        return made
    whole, into = on_whole(storage, torch.int64).numpy(), on_whole(made, dtype).numpy()
    for start in range(0, count, PART):
        part, narrowed = whole[start : start + PART], into[start : start + PART]
        narrowed[:] = part
        if not np.array_equal(narrowed, part):
            return None
    return made


def widen(kept: torch.Tensor, count: int, form: str) -> torch.Tensor:
    """A new storage of ``count`` elements, as :func:`narrow` has found them."""
    whole_dtype = torch.float32 if form == HALF else torch.int64
    whole = on_whole(new_storage(count * whole_dtype.itemsize, kept.device), whole_dtype)
    if kept.device.type != "cpu":
        return whole.copy_(kept.view(DTYPES[form]))
    if form != HALF:
        whole.numpy()[:] = kept.view(DTYPES[form]).numpy()
        return whole
    np.left_shift(kept.numpy().view(np.uint16), 16, out=whole.numpy().view(np.uint32), dtype=np.uint32)
    return whole
