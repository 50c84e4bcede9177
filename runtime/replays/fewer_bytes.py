"""Indices and casts: a saved value of which fewer bytes of each element hold all, kept and widened again.

What made a value decides, and never its contents. Indices are results of recorded ops, which a size of what these read
bounds: they fit into 1, 2 or 4 bytes. A recorded cast makes float32 of bfloat16 whose bits are the upper halves. Halves
are cut off as integers, so that each payload of a NaN stays, and widened by a cast, as they were made.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np
import torch

from poochplan.formats import forms
from poochplan.formats.forms import HALF, INTEGERS
from poochplan.tensors.operators import unflatten
from poochplan.tensors.storages import new_storage, on_whole
from poochplan.torch_private.tensor_internals import CASTING, schema_of

from .replay import RecordedOp, StorageRecord, View

PART = 1 << 16
"""Elements that are narrowed or widened at a time on the CPU."""


def _op(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch.ops)


POOLING = {_op(name): dims for name, dims in forms.POOLING.items()}
CHOOSING = {_op(name): result for name, result in forms.CHOOSING.items()}
"""The ops of ``formats/forms.py``, with what it knows of them."""
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, HALF: torch.bfloat16}
"""The forms, by their names in plans."""


def has_form(record: StorageRecord, dtype: torch.dtype, form: str) -> bool:
    """Whether what has made a storage, which is saved as that ``dtype``, says that this form holds it."""
    birth = record.birth
    if birth is None or record.writes:
        return False
    if form != HALF:
        return dtype is torch.int64 and form in INTEGERS and _bound_of(birth, record) <= INTEGERS[form]
    is_cast = birth.func is CASTING and [one.geometry.dtype for one in birth.reads] == [torch.bfloat16]
    return is_cast and unflatten(list(birth.arguments), birth.spec)[1].get("dtype") is dtype is torch.float32


def _bound_of(birth: RecordedOp, record: StorageRecord) -> float:
    """All elements of the storage are below it; infinity if the op has another result there."""
    args, kwargs = unflatten(list(birth.arguments), birth.spec)
    result = CHOOSING.get(birth.func, 1)
    is_result = any(one.record is record and one.position == result for one in birth.births)
    if not is_result or not args or not isinstance(args[0], View):
        return float("inf")

    def given(name: str, default: Any) -> Any:
        places = {one.name: (place, one) for place, one in enumerate(schema_of(birth.func).arguments)}
        if name not in places:
            return default
        place, argument = places[name]
        return args[place] if place < len(args) else kwargs.get(name, argument.default_value)

    shape, dims = args[0].geometry.shape, POOLING.get(birth.func)
    if birth.func in CHOOSING:
        dim = given("dim", None)
        return prod(shape) if dim is None or not shape else shape[dim]
    if dims is None or len(shape) < dims:
        return float("inf")
    # The window of a result may lie in the padding alone. Its index is then that of its first place inside the bounds
    # that dilation leaves: each coordinate is below the larger of extent and dilation.
    dilations = given("dilation", 1)
    dilations = [dilations] if isinstance(dilations, int) else dilations
    return prod(map(max, shape[-dims:], dilations if len(dilations) == dims else [dilations[0]] * dims))


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
