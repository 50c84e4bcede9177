"""Narrow forms: how few bytes hold a saved value exactly, by what has made it and never by its contents.

* *Bits*: a mask, with one bit for each element.
* *Integers* of 1, 2 or 4 bytes: indices of 8 bytes that a size bounds. Pooling makes them, or a choice of elements
  along one dimension.
* *Upper halves*: float32 that one cast has made of bfloat16. The lower halves are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .profile_parts import Phase, ProfileData

BITS = "bits"
"""The form of masks; the other forms are named by the type of their elements."""
BITS_DTYPE = "uint8"
INTEGERS = {"uint8": 1 << 8, "uint16": 1 << 16, "int32": 1 << 31}
"""Types that indices are narrowed to, and the bounds below which they hold them all."""
INDEX, INDEX_BYTES = "int64", 8
HALF, WIDE = "bfloat16", "float32"
"""Elements of the second type that are made of those of the first have them as their upper halves."""
FORM_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, HALF: 2}
"""Bytes of an element in each form but bits."""
CASTING = "aten._to_copy.default"
"""The op that makes float32 of bfloat16."""
POOLING = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
    "aten.adaptive_max_pool2d.default": 2,
    "aten.adaptive_max_pool3d.default": 3,
}
"""Ops whose second result has indices into the last dimensions of their input, so many."""
CHOOSING = {
    "aten.max.dim": 1,
    "aten.min.dim": 1,
    "aten.topk.default": 1,
    "aten.sort.default": 1,
    "aten.sort.stable": 1,
    "aten.argmax.default": 0,
}
"""Ops with a result, at that position, of indices into one dimension of their input."""


def form_of(profile: ProfileData, value: int) -> str:
    """The form in which a plan may hold a saved value; "" if the op that has made it says that there is none.

    A value of another op has bits, if any: ``narrow.py`` tells which are masks.
    """
    born = profile.values[value].born
    if born < 0:
        return ""
    op = profile.ops[born]
    if op.name in POOLING or op.name in CHOOSING:
        return _integer(profile, value) if profile.values[value].dtype == INDEX else ""
    if op.name == CASTING:
        return HALF if _has_upper_halves(profile, value) else ""
    return BITS


def _has_upper_halves(profile: ProfileData, value: int) -> bool:
    """Whether a cast has made float32 of bfloat16 that the forward pass of the step has made."""
    op = profile.ops[profile.values[value].born]
    if len(op.inputs) != 1 or op.outputs != (value,) or profile.values[value].dtype != WIDE:
        return False
    read = profile.values[op.inputs[0]]
    is_made = read.born >= 0 and profile.ops[read.born].phase is Phase.FORWARD and read.stretch_of < 0
    return read.dtype == HALF and is_made


def _integer(profile: ProfileData, value: int) -> str:
    """The smallest integers that hold indices. The profile does not tell the dimension in question, nor whether the op
    has read a view of another shape. So the bound is the largest that the shapes allow; the runtime knows it.
    """
    op = profile.ops[profile.values[value].born]
    position = 1 if op.name in POOLING else CHOOSING[op.name]
    if op.outputs[position : position + 1] != (value,) or not op.inputs:
        return ""
    whole, shape = profile.values[op.inputs[0]].shape, profile.values[value].shape
    if op.name in POOLING:
        leading = len(whole) - POOLING[op.name]
        extents = [prod(whole[leading:])] if leading > 0 and whole[:leading] == shape[:leading] else []
    else:
        extents = [extent for at, extent in enumerate(whole) if _is_along(whole, at, shape)]
    bound = max(extents, default=prod(whole))
    return next((dtype for dtype, above in INTEGERS.items() if bound <= above), "")


def _is_along(whole: Sequence[int], at: int, shape: Sequence[int]) -> bool:
    """Whether a result of that shape may come of choosing along dimension ``at``, which goes or gets another extent."""
    before, behind = tuple(whole[:at]), tuple(whole[at + 1 :])
    if tuple(shape) == before + behind:
        return True
    return len(shape) == len(whole) and tuple(shape[:at]) == before and tuple(shape[at + 1 :]) == behind
