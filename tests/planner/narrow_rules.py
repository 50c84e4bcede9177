"""What the independent judge of plans knows of narrow forms. Shares no code with the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from poochplan.formats.profile import Op, Phase, Profile, Value

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "bool": 1, "int64": 8}
KEPT_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, "bfloat16": 2}
AT_ONCE = 1 << 24  # elements that CUDA narrows or widens at a time as bits
POOLS = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3}
CHOICES = ("aten.max.dim", "aten.min.dim", "aten.topk.default", "aten.sort.default", "aten.sort.stable")


def bytes_as(form: str, whole: Value) -> int:
    """Bytes of a value in a form."""
    count = whole.size_bytes // ITEM_BYTES[whole.dtype]
    return math.ceil(count / 8) if form == "bits" else KEPT_BYTES[form] * count


def elements_as(form: str, whole: Value) -> int:
    return whole.size_bytes // ITEM_BYTES[whole.dtype] if form != "bits" else bytes_as(form, whole)


def fault(profile: Profile, value: int, writers: Sequence[Op], form: str) -> str:
    """Why a value that these ops have written has no such form; empty if it has."""
    op, whole = writers[0], profile.values[value]
    if form == "bits":
        return _fault_of_mask(value, whole, writers)
    if len(writers) != 1:
        return f"{whole.name} has {len(writers)} writers"
    if form == "bfloat16":
        read = profile.values[op.inputs[0]]
        is_cast = op.name == "aten._to_copy.default" and len(op.inputs) == 1 and whole.dtype == "float32"
        is_of_step = read.born >= 0 and profile.ops[read.born].phase is Phase.FORWARD
        return "" if is_cast and is_of_step and read.dtype == "bfloat16" else f"{op.name} makes no upper halves"
    pool = op.name.removeprefix("aten.").removesuffix(".default")
    is_second = op.outputs[1:] == (value,) and (pool in POOLS or op.name in CHOICES)
    if whole.dtype != "int64" or not (is_second or (op.name == "aten.argmax.default" and op.outputs == (value,))):
        return f"{op.name} makes no indices"
    shape = profile.values[op.inputs[0]].shape
    extent = min(shape, default=1)  # the judge does not know the dimension
    least = math.prod(shape[-POOLS[pool] :]) if pool in POOLS else extent
    return "" if least <= {"uint8": 256, "uint16": 65536, "int32": 1 << 31}[form] else f"{form} is too small"


def _fault_of_mask(value: int, whole: Value, writers: Sequence[Op]) -> str:
    if len(writers) == 1:
        name = writers[0].name
        return "" if name in ("aten.native_dropout.default", "aten.bernoulli.p") else f"{name} makes no mask"
    fresh = ("aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default")
    if writers[0].name not in fresh or writers[1].name != "aten.bernoulli_.float":
        return f"{writers[1].name} draws no mask"
    if not all(op.name in ("aten.div_.Scalar", "aten.mul_.Scalar") for op in writers[2:]):
        return "it is scaled alone"
    return "" if all(op.inputs == op.writes == (value,) for op in writers[1:]) else "a mask depends on nothing"
