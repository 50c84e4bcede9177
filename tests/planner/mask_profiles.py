"""Random steps with dropout: masks that chance fills, of which a plan may hold the bits; numbers, or bools on CUDA."""

from __future__ import annotations

import random

from msgspec.structs import replace

from poochplan.formats.narrow import BOOL, DROPOUT, LEAST_MASK_BYTES
from poochplan.formats.profile import Kind, PointKind, Profile
from tests.planner.random_profiles import Recorder, any_seconds, few_seconds, finished_with_a_random_link

UNIT = LEAST_MASK_BYTES
FRESH, DRAW, SCALE = "aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar"


def mask_profile(seed: int | str, blocks: int = 5) -> Profile:
    """Layers with dropout. Some masks are used twice, written later, drawn quickly, or cannot be drawn again."""
    rng = random.Random(f"masks {seed}")
    r = Recorder()
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [_size(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        x = _block(r, rng, x)
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
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [4 * _size(rng)], seconds=any_seconds(rng))
    for _ in range(blocks):
        size = 4 * _size(rng)
        (h,) = r.op("linear", [x], [size], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))
        saves = [h] if rng.random() < 0.3 else []
        out, made = fused(r, h, size // 4, seconds=any_seconds(rng), saves=saves)
        if rng.random() < 0.3:  # the mask is read in forward
            (out,) = r.op("mul", [out, made], [size], saves=[out, made], seconds=few_seconds(rng))
        (x,) = r.op("linear", [out], [4 * _size(rng)], saves=[out], seconds=any_seconds(rng))
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


def _block(r: Recorder, rng: random.Random, x: int) -> int:
    kind = rng.choice(["dropout", "dropout", "dropout", "twice", "plain", "written", "quick", "lost"])
    size = r.values[x].size_bytes
    if kind == "plain":
        return r.op("linear", [x], [_size(rng)], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))[0]
    (h,) = r.op("linear", [x], [size], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))
    drawn_s = 1e-7 if kind == "quick" else any_seconds(rng)
    made = mask(r, size, seconds=drawn_s, workspace_bytes=rng.choice([0, size]), scales=rng.choice([0, 1, 1, 2]))
    if kind == "lost":
        r.values[made].unreplayable = "it gave other bits"
    (h,) = r.op("mul", [h, made], [size], saves=[made], seconds=few_seconds(rng))
    if kind == "twice":
        (h,) = r.op("mul", [h, made], [size], saves=[h, made], seconds=few_seconds(rng))
    if kind == "written":
        r.op("add_", [made], writes=[made], seconds=few_seconds(rng), in_graph=False)
    return r.op("linear", [x, h], [_size(rng)], saves=[h], seconds=any_seconds(rng))[0]


def _size(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4, 6]) * UNIT + rng.choice([0, 0, 4, 100])
