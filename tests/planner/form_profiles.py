"""Random steps with pools and casts: indices, which fit into smaller integers, and float32 with upper halves."""

from __future__ import annotations

import random

from msgspec.structs import replace

from poochplan.formats.forms import CASTING
from poochplan.formats.narrow import LEAST_MASK_BYTES
from poochplan.formats.profile import Kind, PointKind, Profile
from tests.planner.mask_profiles import on_cuda
from tests.planner.random_profiles import Recorder, any_seconds, finished_with_a_random_link

POOL = "aten.max_pool2d_with_indices.default"
UNIT = LEAST_MASK_BYTES


def pool(r: Recorder, h: int, count: int, *, seconds: float, saves: list[int]) -> list[int]:
    """A pool that makes so many results, and saves their indices."""
    made = r.op(POOL, [h], [4 * count, 8 * count], saves=saves, seconds=seconds)
    r.nodes[-1].handles.append(r._pack(made[1], len(r.ops)))
    return made


def cast(r: Recorder, x: int, count: int, *, seconds: float, cast_s: float, is_written: bool = True) -> int:
    """The square of float32 that a cast makes of bfloat16, which is written later or gone."""
    (narrow,) = r.op("mul", [x], [2 * count], seconds=seconds)
    (wide,) = r.op(CASTING, [narrow], [4 * count], seconds=cast_s)
    (squared,) = r.op("square", [wide], [4 * count], saves=[wide], seconds=cast_s)
    if is_written:
        r.op("mul_", [narrow], writes=[narrow], seconds=cast_s)
    return squared


def with_types(profile: Profile, side: int = 16) -> Profile:
    """The types and shapes of what pools and casts read and make; planes have ``side`` times ``side`` elements."""
    values, ticks = list(profile.values), profile.point_ticks
    for op in profile.ops:
        if op.name == CASTING:
            count = values[op.outputs[0]].size_bytes // 4
            values[op.inputs[0]] = replace(values[op.inputs[0]], dtype="bfloat16", shape=(count,))
            values[op.outputs[0]] = replace(values[op.outputs[0]], dtype="float32", shape=(count,))
        if op.name == POOL:
            indices = op.outputs[1]
            values[op.inputs[0]] = replace(values[op.inputs[0]], dtype="float32", shape=(2, 3, side, side))
            values[indices] = replace(values[indices], dtype="int64", shape=(2, 3, side // 2, side // 2))
    for number, point in enumerate(profile.points):
        value = profile.handles[point.handle].value
        if point.kind is PointKind.SAVE and values[value].dtype == "int64":
            death = max(values[value].forward_death, ticks[number])
            values[value] = replace(values[value], forward_death=death)
    saved = ((handle, values[handle.value]) for handle in profile.handles)
    handles = tuple(replace(handle, dtype=value.dtype, shape=value.shape) for handle, value in saved)
    return replace(profile, values=tuple(values), handles=handles)


def form_profile(seed: int | str, blocks: int = 5) -> Profile:
    """Layers with pools of what is saved or is not, and casts of what is written later, or gone."""
    rng = random.Random(f"forms {seed}")
    r = Recorder()
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [_size(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        count = _size(rng) // 4
        (h,) = r.op("linear", [x], [16 * count], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))
        if rng.random() < 0.6:
            saves = [h] if rng.random() < 0.5 else []
            (h, indices) = pool(r, h, count, seconds=any_seconds(rng), saves=saves)
            if rng.random() < 0.3:  # the indices are used twice
                (h,) = r.op("gather", [h, indices], [4 * count], saves=[indices], seconds=any_seconds(rng) / 10)
        else:
            seconds = {"seconds": any_seconds(rng), "cast_s": any_seconds(rng) / 10}
            h = cast(r, h, count, **seconds, is_written=rng.random() < 0.5)
        (x,) = r.op("linear", [h], [_size(rng)], saves=[h], seconds=any_seconds(rng))
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    profile = with_types(finished_with_a_random_link(r, rng), rng.choice([16, 64, 512]))
    return on_cuda(profile) if rng.random() < 0.5 else profile


def _size(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4]) * UNIT + rng.choice([0, 0, 4, 100])
