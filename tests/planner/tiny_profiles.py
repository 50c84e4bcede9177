"""Tiny random steps, small enough to search exhaustively: every shape that makes a schedule hard, a few values each.

Chains, skips held to the end of forward, diamonds (an input of a replay freed by its own last use before it), in-place
chains, values needed twice, ops that bear two saved values; links from much slower to much faster than compute. And
steps of one to four values whose best plan is worked out by hand, in seconds and megabytes.
"""

from __future__ import annotations

import random
from typing import Any

from poochplan.formats.profile import Kind, Link, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable
from poochplan.planner.simulator.sources import with_sources
from tests.planner.random_profiles import Recorder, any_seconds, few_seconds, finished_with_a_random_link, link

ATTEMPTS = 200
UNIT_S = 1e-3


def tiny_profile(seed: int, lowest: int = 2, highest: int = 5) -> Profile:
    """A step with ``lowest`` to ``highest`` movable values, whose smallest budget is below its in-core peak."""
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{seed}/{attempt}")
        is_plain = rng.random() < 0.7
        profile = _step(rng, rng.randint(lowest, highest), is_plain)
        count = len(movable(Problem.of(profile)))
        if lowest <= count <= highest and smallest_budget(profile) < profile.in_core_peak_bytes:
            return profile
    raise AssertionError(f"seed {seed} gives no profile with {lowest} to {highest} movable values")


def tiny_with_sources(seed: int) -> tuple[Profile, Problem, int]:
    """A step that has sources, with at most five movable values then, and a plan below its in-core peak; the problem
    that its plans solve, and a budget.
    """
    for attempt in range(ATTEMPTS):
        profile = cast_profile(f"{seed}/{attempt}", 1 + attempt % 2)
        planned = with_sources(profile)
        if planned is profile or len(movable(Problem.of(planned))) > 5:
            continue
        if smallest_budget(profile) < profile.in_core_peak_bytes:
            return profile, Problem.of(planned), tiny_budget(profile, seed)
    raise AssertionError(f"seed {seed} gives no profile with sources and at most five movable values")


def tiny_budget(profile: Profile, seed: int) -> int:
    """A random budget from the smallest feasible one to a byte below the in-core peak."""
    rng = random.Random(f"budget {seed}")
    smallest = smallest_budget(profile)
    if rng.random() < 0.15:
        return smallest
    return rng.randint(smallest, profile.in_core_peak_bytes - 1)


def tiny_instance(seed: int, lowest: int = 2, highest: int = 5) -> tuple[Profile, Problem, int]:
    """The step, its problem, and the budget."""
    profile = tiny_profile(seed, lowest, highest)
    return profile, Problem.of(profile), tiny_budget(profile, seed)


def _step(rng: random.Random, wanted: int, is_plain: bool) -> Profile:
    r = Recorder()
    alive = [r.before(1024, Kind.INPUT)]
    held: list[int] = []
    (x,) = r.op("stem", alive, [_size(rng)], seconds=any_seconds(rng), backward_s=any_seconds(rng))
    alive.append(x)
    while len(r.saved) < wanted:
        _block(r, rng, alive, held)
    times: dict[str, Any] = {"seconds": any_seconds(rng), "backward_s": any_seconds(rng)}
    r.op("join", [alive[-1], *held], [512], saves=alive[-1:], **times)
    return r.finish(_link(rng, r, is_plain), optimizer_s=rng.choice([0.0, UNIT_S]))


def _block(r: Recorder, rng: random.Random, alive: list[int], held: list[int]) -> None:
    """One op or two, of the shapes above."""
    x = alive[-1]
    times: dict[str, Any] = {"seconds": any_seconds(rng), "backward_s": any_seconds(rng)}
    shape = rng.choice(["chain", "chain", "chain", "unsaved", "skip", "inplace", "twice", "pair", "head", "outputs"])
    if shape == "chain":
        alive += r.op("linear", [x], [_size(rng)], saves=[x], workspace_bytes=rng.choice([0, 0, 4096]), **times)
    elif shape == "unsaved":
        alive += r.op("add", [x, *rng.sample(alive[1:], k=1)], [_size(rng)], **times)
    elif shape == "skip":
        if rng.random() < 0.5:
            held.append(x)
        source = rng.choice(alive[1:])
        alive += r.op("cat", list(dict.fromkeys([x, source])), [_size(rng)], saves=[source], **times)
    elif shape == "inplace":
        (y,) = r.op("conv", [x], [_size(rng)], saves=[x] if rng.random() < 0.5 else [], **times)
        alive += r.op("relu_", [y], writes=[y], saves_outputs=True, seconds=any_seconds(rng) / 4)
    elif shape == "twice":
        (y,) = r.op("linear", [x], [_size(rng)], saves=[x], **times)
        alive += r.op("mul", [x, y], [_size(rng)], saves=[x, y], seconds=any_seconds(rng))
    elif shape == "pair":
        y, z = r.op("split", [x], [_size(rng), _size(rng)], **times)
        alive += r.op("mul", [y, z], [_size(rng)], saves=[y, z], seconds=any_seconds(rng))
    elif shape == "head":
        (y,) = r.op("branch", [x], [_size(rng)], **times)
        r.op("head", [x], [512], saves=[x], seconds=any_seconds(rng))
        alive += r.op("linear", [y], [_size(rng)], saves=[y], seconds=any_seconds(rng))
    else:
        alive += r.op("exp", [x], [_size(rng)], saves_outputs=True, opaque=rng.random() < 0.1, **times)


def _size(rng: random.Random) -> int:
    return rng.choice([1, 1, 2, 3, 4, 6, 8]) * rng.choice([1024, 1024, 1500, 2048])


def _link(rng: random.Random, r: Recorder, is_plain: bool) -> Link:
    """From 30 times slower to 30 times faster than what hides all copies."""
    saved_bytes = sum(r.values[v].size_bytes for v in r.saved)
    fair_gb_per_s = saved_bytes / (UNIT_S * max(1, len(r.ops))) / 1e9
    outward = fair_gb_per_s * 10 ** rng.uniform(-1.5, 1.5)
    inward = outward * rng.choice([1.0, 1.0, 0.5, 2.0])
    latency_s = rng.choice([0.0, 0.0, 0.05, 0.5]) * UNIT_S
    if is_plain:
        return link(outward, latency_s, inward_gb_per_s=inward)
    return link(
        outward,
        latency_s,
        duplex=rng.choice([1.0, 0.5, 0.75]),
        interference_out=rng.choice([0.0, 0.2, 0.5]),
        interference_in=rng.choice([0.1, 0.3]),
        inward_gb_per_s=inward,
    )


CASTS = ("aten._to_copy.default", "aten.clone.default")


def cast_profile(seed: int | str, blocks: int = 6) -> Profile:
    """Residuals of which blocks save copies; some copies are used twice, some sources are saved, or written later."""
    rng = random.Random(f"casts {seed}")
    r = Recorder()
    (x,) = r.op(
        "stem",
        [r.before(1024, Kind.INPUT)],
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
    return rng.choice([1, 2, 3, 4, 6]) * 1024


def _linear(r: Recorder, rng: random.Random, x: int, size: int) -> int:
    """What half of the layers save is their input."""
    return r.op("linear", [x], [size], saves=[x] if rng.random() < 0.5 else [], seconds=any_seconds(rng))[0]


MB = 1_000_000
SMALL = 512


def gb_per_s(seconds_per_mb: float) -> float:
    """The rate at which a megabyte takes so long."""
    return MB / seconds_per_mb / 1e9


def one_value(seconds_per_mb: float, *, opaque: bool = False) -> Profile:
    """x is saved at 1 s; a point at 2 s; an op that needs 5 MB of workspace; points at 3 s and, using x, at 4 s.

    In-core 5 s. Within 5.5 MB x is away during that op. Making x takes 1 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=opaque)
    (y,) = r.op("use", [x], [SMALL], saves=[x], seconds=1, backward_s=1)
    r.op("big", [y], [SMALL], saves=[y], seconds=1, backward_s=1, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(seconds_per_mb)))


def two_values(seconds_per_mb: float) -> Profile:
    """x and y are saved at 2 and 4 s and used at 10 and 8 s; within 5.5 MB both are away from 6 s to 7 s.

    In-core 12 s. Neither can be replayed.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=2, backward_s=0, opaque=True)
    (y,) = r.op("first", [x], [MB], saves=[x], seconds=2, backward_s=2, opaque=True)
    (z,) = r.op("second", [y], [SMALL], saves=[y], seconds=2, backward_s=2)
    r.op("big", [z], [SMALL], saves=[z], seconds=1, backward_s=1, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(seconds_per_mb)))


def small_from_large() -> Profile:
    """y (1 MB) is made from x (4 MB) in 1 s; backward uses x first, then has 10 MB of gradients live, then uses y.

    Within 12.5 MB y is away in forward (13 MB with it). Replayed at its own use it would hold x beside the gradients
    (14 MB); replayed at the use of x it makes that 11 MB. Copies take 100 s a megabyte; in-core 14 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [4 * MB], seconds=2, backward_s=0, opaque=True)
    (y,) = r.op("small", [x], [MB], seconds=1, backward_s=1)
    (w,) = r.op("head", [y], [SMALL], saves=[y], seconds=1, backward_s=1)
    (u,) = r.op("wide", [w], [6 * MB], saves=[w], seconds=1, backward_s=1, workspace_bytes=2 * MB)
    (v,) = r.op("narrow", [u], [SMALL], seconds=1, backward_s=1)
    r.op("join", [v, x], [SMALL], saves=[x], seconds=1, backward_s=3)
    return r.finish(link(gb_per_s(100)))


def replay_beside_a_copy() -> Profile:
    """a (2 s to make) and b (2 s each way, no replay) are both used at 8 s, where b's way back begins.

    Within 5.5 MB both are away in forward; the best plan replays a while b comes back: 2 s for both; in-core 9 s.
    """
    r = Recorder()
    (a,) = r.op("make_a", [r.before(SMALL, Kind.INPUT)], [MB], seconds=2, backward_s=0)
    (b,) = r.op("make_b", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=True)
    (c,) = r.op("both", [a, b], [SMALL], saves=[a, b], seconds=4, backward_s=1)
    r.op("big", [c], [SMALL], saves=[c], seconds=1, backward_s=0, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(2)))


def out_through_backward() -> Profile:
    """x (4 s out, 0 s back) is saved at 1 s, forward ends at 2.75 s, and memory asks for it at 5.75 s, in backward.

    Within 8.5 MB it is away while t (4 MB) meets its gradient; its copy out ends at 5 s. In-core 8.75 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=True)
    (y,) = r.op("use", [x], [SMALL], saves=[x], seconds=1, backward_s=1)
    (t,) = r.op("widen", [y], [4 * MB], seconds=0.25, backward_s=1, opaque=True)
    (o,) = r.op("narrow", [t], [SMALL], saves=[t], seconds=0.25, backward_s=1)
    r.op("slow", [o], [SMALL], saves=[o], seconds=0.25, backward_s=3)
    return r.finish(link(gb_per_s(4), inward_gb_per_s=1e6))


def two_values_of_one_op() -> Profile:
    """One op of 2 s bears a and b, one of 1 s makes c of them; within 10.5 MB all three are away.

    Backward uses c first, whose replay brings all three back and runs each op once: 3 s. Copies take 1000 s a megabyte;
    in-core 9 s.
    """
    r = Recorder()
    a, b = r.op("split", [r.before(SMALL, Kind.INPUT)], [MB, MB], seconds=2, backward_s=0)
    (c,) = r.op("mul", [a, b], [MB], saves=[a, b], seconds=1, backward_s=1)
    (d,) = r.op("use", [c], [SMALL], saves=[c], seconds=1, backward_s=1)
    r.op("big", [d], [SMALL], saves=[d], seconds=2, backward_s=1, workspace_bytes=10 * MB)
    return r.finish(link(gb_per_s(1000)))
