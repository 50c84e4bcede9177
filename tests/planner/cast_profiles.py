"""Random steps that save larger copies of values that nothing else saves, as norms in 16 bits do."""

from __future__ import annotations

import random

from poochplan.formats.profile import Kind, Profile
from tests.planner.random_profiles import Recorder, any_seconds, few_seconds, finished_with_a_random_link

UNIT = 1024
CASTS = ("aten._to_copy.default", "aten.clone.default")


def cast_profile(seed: int | str, blocks: int = 6) -> Profile:
    """Residuals of which blocks save copies; some copies are used twice, some sources are saved, or written later."""
    rng = random.Random(f"casts {seed}")
    r = Recorder()
    (x,) = r.op("stem", [r.before(UNIT, Kind.INPUT)], [_size(rng)], seconds=any_seconds(rng), opaque=rng.random() < 0.1)
    for _ in range(blocks):
        x = _block(r, rng, x)
    r.op("loss", [x], [512], saves=[x], seconds=any_seconds(rng))
    return finished_with_a_random_link(r, rng)


def _block(r: Recorder, rng: random.Random, x: int) -> int:
    kind = rng.choice(["norm", "norm", "norm", "twice", "plain", "written", "saved", "pair"])
    size = r.values[x].size_bytes
    if kind == "plain":
        return r.op("linear", [x], [_size(rng)], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))[0]
    wide = r.op(rng.choice(CASTS), [x], [rng.choice([2, 2, 3]) * size], saves_outputs=True, seconds=few_seconds(rng))[0]
    reads = [wide]
    if kind in ("twice", "pair"):
        reads += r.op("rsqrt", [wide], [_size(rng) // 4 * 4], saves_outputs=True, seconds=few_seconds(rng))
    (h,) = r.op("mul", reads, [size], saves=reads, saves_outputs=rng.random() < 0.5, seconds=few_seconds(rng))
    if kind == "pair":
        r.op("also", [x, h], [512], saves=[h], seconds=any_seconds(rng))
    if kind == "written":
        r.op("add_", [x], writes=[x], seconds=few_seconds(rng))
    (h,) = r.op("linear", [h], [size], saves=[h], seconds=any_seconds(rng))
    saves = [x] if kind == "saved" else []
    reads = [x, h] if saves or rng.random() < 0.8 else [h]
    return r.op("add", reads, [_size(rng)], saves=saves, seconds=few_seconds(rng))[0]


def _size(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4, 6]) * UNIT
