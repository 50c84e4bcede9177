"""Tiny random steps, small enough to search exhaustively: every shape that makes a schedule hard, a few values each.

Chains, skips held to the end of forward, diamonds (an input of a replay freed by its own last use before it), in-place
chains, values needed twice, ops that bear two saved values; links from much slower to much faster than compute.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from poochplan.formats.narrow import with_bits
from poochplan.formats.profile import Kind, Link, Profile
from poochplan.formats.sources import with_sources
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import movable, swap_all_on_demand
from tests.planner.form_profiles import bool_profile, cast_profile, form_profile, mask_profile
from tests.planner.random_profiles import Recorder, any_seconds, link

ATTEMPTS = 200
UNIT_S = 1e-3


class Form(NamedTuple):
    """Random steps of some blocks, what adds the smaller form to a profile, and bytes of such a step."""

    profile: Callable[[int | str, int], Profile]
    added: Callable[[Profile], Profile]
    size_bytes: int


FORMS = {
    "sources": Form(cast_profile, with_sources, 40_000),
    "bits": Form(mask_profile, with_bits, 400_000),
    "bits of bools on CUDA": Form(bool_profile, with_bits, 1_600_000),
    "integers and upper halves": Form(form_profile, with_bits, 1_600_000),
}
"""The smaller forms that a plan may hold in place of saved values."""


def tiny_profile(seed: int, lowest: int = 2, highest: int = 5) -> Profile:
    """A step with ``lowest`` to ``highest`` movable values, whose smallest budget is below its in-core peak."""
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{seed}/{attempt}")
        is_plain = rng.random() < 0.7
        profile = _step(rng, rng.randint(lowest, highest), is_plain)
        count = len(movable(build_problem(profile)))
        if lowest <= count <= highest and smallest_budget(profile) < profile.in_core_peak_bytes:
            return profile
    raise AssertionError(f"seed {seed} gives no profile with {lowest} to {highest} movable values")


def tiny_with(form: Form, seed: int) -> tuple[Profile, Problem, int]:
    """A step that has the form, with at most five movable values then, and a plan below its in-core peak; the problem
    that its plans solve, and a budget.
    """
    for attempt in range(ATTEMPTS):
        profile = form.profile(f"{seed}/{attempt}", 1 + attempt % 2)
        planned = form.added(profile)
        if planned is profile or len(movable(build_problem(planned))) > 5:
            continue
        if smallest_budget(profile) < profile.in_core_peak_bytes:
            problem, budget_bytes = build_problem(planned), tiny_budget(profile, seed)
            if swap_all_on_demand(problem).peak_bytes > budget_bytes:
                problem = build_problem(profile)  # narrowing takes memory itself
            return profile, problem, budget_bytes
    raise AssertionError(f"seed {seed} gives no profile with something added and at most five movable values")


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
    return profile, build_problem(profile), tiny_budget(profile, seed)


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
