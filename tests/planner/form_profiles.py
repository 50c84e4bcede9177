"""Random steps with smaller forms of saved values: masks that chance fills, as numbers or as bools on CUDA; indices of
pools, which fit into smaller integers; float32 with upper halves; and larger copies of values that nothing else saves.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from poochplan.formats.forms import CASTING
from poochplan.formats.narrow import BOOL, DROPOUT, LEAST_MASK_BYTES
from poochplan.formats.profile import Kind, PointKind, Profile
from tests.planner.random_profiles import Recorder, any_seconds, few_seconds, finished_with_a_random_link

UNIT = LEAST_MASK_BYTES
FRESH, DRAW, SCALE = "aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar"


def mask_profile(seed: int | str, blocks: int = 5) -> Profile:
    """Layers with dropout. Some masks are used twice, written later, drawn quickly, or cannot be drawn again."""
    rng = random.Random(f"masks {seed}")
    r = Recorder()
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [_mask_bytes(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        x = _mask_block(r, rng, x)
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    return finished_with_a_random_link(r, rng)


def mask(r: Recorder, size_bytes: int, *, seconds: float = 1e-3, workspace_bytes: int = 0, scales: int = 1) -> int:
    """The ops that make a mask."""
    (made,) = r.op(FRESH, [], [size_bytes], seconds=1e-5, in_graph=False)
    of_drawing = {"seconds": seconds, "random": True, "workspace_bytes": workspace_bytes}
    r.op(DRAW, [made], writes=[made], in_graph=False, **of_drawing)  # type: ignore[arg-type]
    for _ in range(scales):
        r.op(SCALE, [made], writes=[made], seconds=1e-4, in_graph=False)
    return made


def bool_profile(seed: int | str, blocks: int = 5) -> Profile:
    """Layers with dropout on a GPU, of what is saved or is not. Some masks are read in forward."""
    rng = random.Random(f"bools {seed}")
    r = Recorder()
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [4 * _mask_bytes(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        size = 4 * _mask_bytes(rng)
        h = _linear(r, rng, x, size)
        saves = [h] if rng.random() < 0.3 else []
        out, made = fused(r, h, size // 4, seconds=any_seconds(rng), saves=saves)
        if rng.random() < 0.3:  # the mask is read in forward
            (out,) = r.op("mul", [out, made], [size], saves=[out, made], seconds=few_seconds(rng))
        (x,) = r.op("linear", [out], [4 * _mask_bytes(rng)], saves=[out], seconds=any_seconds(rng))
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    return of_bools(on_cuda(finished_with_a_random_link(r, rng)))


def fused(r: Recorder, h: int, count: int, *, seconds: float, saves: list[int], element_bytes: int = 4) -> list[int]:
    """Dropout that makes a result and a mask of bools, of so many elements."""
    sizes = [element_bytes * count, count]
    made = r.op(DROPOUT, [h], sizes, saves=saves, seconds=seconds, random=True)
    r.nodes[-1].handles.append(r._pack(made[1], len(r.ops)))
    return made


def of_bools(profile: Profile) -> Profile:
    """The profile with masks of bools, which dropout holds while they are saved."""
    values, ticks = list(profile.values), profile.point_ticks
    for number, point in enumerate(profile.points):
        mask = values[profile.handles[point.handle].value]
        if point.kind is PointKind.SAVE and profile.ops[mask.born].name == DROPOUT and mask.name.endswith("out2"):
            death = max(mask.forward_death, ticks[number])
            values[profile.handles[point.handle].value] = replace(mask, dtype=BOOL, forward_death=death)
    return replace(profile, values=tuple(values))


def on_cuda(profile: Profile, *, bits_kernel: bool = False) -> Profile:
    return replace(profile, device=replace(profile.device, kind="cuda", bits_kernel=bits_kernel))


def _mask_block(r: Recorder, rng: random.Random, x: int) -> int:
    kind = rng.choice(["dropout", "dropout", "dropout", "twice", "plain", "written", "quick", "lost"])
    size = r.values[x].size_bytes
    if kind == "plain":
        return _linear(r, rng, x, _mask_bytes(rng))
    h = _linear(r, rng, x, size)
    drawn_s = 1e-7 if kind == "quick" else any_seconds(rng)
    made = mask(r, size, seconds=drawn_s, workspace_bytes=rng.choice([0, size]), scales=rng.choice([0, 1, 1, 2]))
    if kind == "lost":
        r.values[made].unreplayable = "it gave other bits"
    (h,) = r.op("mul", [h, made], [size], saves=[made], seconds=few_seconds(rng))
    if kind == "twice":
        (h,) = r.op("mul", [h, made], [size], saves=[h, made], seconds=few_seconds(rng))
    if kind == "written":
        r.op("add_", [made], writes=[made], seconds=few_seconds(rng), in_graph=False)
    return r.op("linear", [x, h], [_mask_bytes(rng)], saves=[h], seconds=any_seconds(rng))[0]


def _linear(r: Recorder, rng: random.Random, x: int, size: int) -> int:
    """What half of the layers save is their input."""
    return r.op("linear", [x], [size], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))[0]


def _mask_bytes(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4, 6]) * UNIT + rng.choice([0, 0, 4, 100])


POOL = "aten.max_pool2d_with_indices.default"


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
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [_form_bytes(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        count = _form_bytes(rng) // 4
        h = _linear(r, rng, x, 16 * count)
        if rng.random() < 0.6:
            saves = [h] if rng.random() < 0.5 else []
            (h, indices) = pool(r, h, count, seconds=any_seconds(rng), saves=saves)
            if rng.random() < 0.3:  # the indices are used twice
                (h,) = r.op("gather", [h, indices], [4 * count], saves=[indices], seconds=any_seconds(rng) / 10)
        else:
            seconds = {"seconds": any_seconds(rng), "cast_s": any_seconds(rng) / 10}
            h = cast(r, h, count, **seconds, is_written=rng.random() < 0.5)
        (x,) = r.op("linear", [h], [_form_bytes(rng)], saves=[h], seconds=any_seconds(rng))
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    profile = with_types(finished_with_a_random_link(r, rng), rng.choice([16, 64, 512]))
    return on_cuda(profile) if rng.random() < 0.5 else profile


def _form_bytes(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4]) * UNIT + rng.choice([0, 0, 4, 100])


CAST_UNIT = 1024
CASTS = ("aten._to_copy.default", "aten.clone.default")


def cast_profile(seed: int | str, blocks: int = 6) -> Profile:
    """Residuals of which blocks save copies; some copies are used twice, some sources are saved, or written later."""
    rng = random.Random(f"casts {seed}")
    r = Recorder()
    (x,) = r.op(
        "stem",
        [r.before(CAST_UNIT, Kind.INPUT)],
        [_cast_bytes(rng)],
        seconds=any_seconds(rng),
        opaque=rng.random() < 0.1,
    )
    for _ in range(blocks):
        x = _cast_block(r, rng, x)
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    return finished_with_a_random_link(r, rng)


def _cast_block(r: Recorder, rng: random.Random, x: int) -> int:
    kind = rng.choice(["norm", "norm", "norm", "twice", "plain", "written", "saved", "pair"])
    size = r.values[x].size_bytes
    if kind == "plain":
        return _linear(r, rng, x, _cast_bytes(rng))
    wide = r.op(rng.choice(CASTS), [x], [rng.choice([2, 2, 3]) * size], saves_outputs=True, seconds=few_seconds(rng))[0]
    reads = [wide]
    if kind in ("twice", "pair"):
        reads += r.op("rsqrt", [wide], [_cast_bytes(rng) // 4 * 4], saves_outputs=True, seconds=few_seconds(rng))
    (h,) = r.op("mul", reads, [size], saves=reads, saves_outputs=rng.random() < 0.5, seconds=few_seconds(rng))
    if kind == "pair":
        r.op("also", [x, h], [512], saves=[h], seconds=any_seconds(rng))
    if kind == "written":
        r.op("add_", [x], writes=[x], seconds=few_seconds(rng))
    (h,) = r.op("linear", [h], [size], saves=[h], seconds=any_seconds(rng))
    saves = [x] if kind == "saved" else []
    reads = [x, h] if saves or rng.random() < 0.8 else [h]
    return r.op("add", reads, [_cast_bytes(rng)], saves=saves, seconds=few_seconds(rng))[0]


def _cast_bytes(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4, 6]) * CAST_UNIT
