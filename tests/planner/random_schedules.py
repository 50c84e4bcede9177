"""Schedules that no planner made: random decisions, carried out at random points; for claims about every plan."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import msgspec

from poochplan.formats.plan import Decision, PointActions
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule
from poochplan.planner.simulator.simulate import swap_all
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import link, random_profile, with_random_thread


def interfering_profile(seed: int) -> Profile:
    """A random step of 4 to 30 ops beside whose copies compute is slower; on a third of them the runtime takes time."""
    rng = random.Random(f"interfering {seed}")
    drawn = (random_profile(rng.getrandbits(32), rng.randint(4, 30)) for _ in itertools.count())
    profile = next(one for one in drawn if any(point.kind is PointKind.USE for point in one.points))
    saved_bytes = sum(profile.values[handle.value].size_bytes for handle in profile.handles)
    fair_gb_per_s = saved_bytes / max(profile.times.step_s, 1e-9) / 1e9
    line = link(
        gb_per_s=fair_gb_per_s * 10 ** rng.uniform(-1, 2),  # most copies hide, and what they cost is interference
        latency_s=rng.choice([0.0, 0.0, 0.01, 0.1]) * profile.times.step_s,
        duplex=rng.choice([1.0, 0.75, 0.5, 0.2]),
        interference_out=rng.choice([0.0, 0.1, 0.5, 3.0]),
        interference_in=rng.choice([0.05, 0.3, 1.0]),
    )
    profile = msgspec.structs.replace(profile, link=line)
    return with_random_thread(profile, seed) if rng.random() < 0.3 else profile


def random_schedule(problem: Problem, seed: int) -> Schedule:
    """Each value is kept, swapped or recomputed where that can be, released and brought back at points of its own."""
    rng = random.Random(f"schedule {seed}")
    decisions = random_decisions(problem, seed) if rng.random() < 0.8 else swap_all(problem)
    at: dict[tuple[bool, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for value, decision in enumerate(decisions):
        use = problem.point_index[problem.first_use_point[value]] if problem.first_use_point[value] >= 0 else -1
        if decision is Decision.SWAP:
            at[False, value]["swap_out"].append(value)
            at[False, rng.randint(value, min(problem.value_count - 1, value + 6))]["release"].append(value)
            if use >= 0 and rng.random() < 0.8:
                at[True, rng.randint(max(0, use - 5), use)]["prefetch"].append(value)
        if decision is Decision.RECOMPUTE and use >= 0 and rng.random() < 0.5:
            at[True, rng.randint(max(0, use - 3), use)]["replay"].append(value)
    actions = tuple(
        PointActions(
            at="use" if is_use else "save",
            index=index,
            **{name: tuple(values) for name, values in at[is_use, index].items()},  # type: ignore[arg-type]
        )
        for is_use, index in sorted(at)
    )
    return Schedule(tuple(decisions), actions, Decision.RECOMPUTE in decisions)
