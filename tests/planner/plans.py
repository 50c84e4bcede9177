"""Plans made of schedules, and schedules nobody would choose, of random decisions at random points: for claims about
every plan, for the independent checker and the runtime.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import PointKind, Profile
from poochplan.formats.profile_parts import host_aligned
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.policies import PolicyInput
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, Tuning
from poochplan.planner.simulator.simulate import Simulation, swap_all
from poochplan.planner.simulator.sources import with_sources
from poochplan.planner.writing import last_recipes, with_decisions
from tests.planner.checker import Verdict
from tests.planner.random_profiles import link, random_profile, with_random_thread
from tests.planner.time_checker import check_times
from tests.runtime.random_plans import random_actions


def budget_at(profile: Profile, share: float) -> int:
    """A budget with ``share`` of the room between the smallest budget and the in-core peak."""
    smallest = smallest_budget(profile)
    return int(smallest + share * (profile.in_core_peak_bytes - smallest))


def input_at(profile: Profile, share: float) -> PolicyInput:
    """The same as the input of a policy."""
    return PolicyInput(Problem.of(profile), budget_at(profile, share))


def plan_with(profile: Profile, schedule: Schedule) -> Plan:
    """A plan that carries out ``schedule``, whatever its peak is."""
    kept = plan(profile, profile.in_core_peak_bytes, arena="off")  # nothing is searched for
    values, offset, until_of = [], 0, last_recipes(Problem.of(profile), schedule.decisions)
    for value, decision in zip(kept.values, schedule.decisions, strict=True):
        swapped = decision is Decision.SWAP
        until = until_of.get(len(values), -1)
        values.append(
            msgspec.structs.replace(value, decision=decision, host_offset=offset if swapped else -1, until=until)
        )
        offset += host_aligned(value.size_bytes) if swapped else 0
    return msgspec.structs.replace(
        kept, values=tuple(values), schedule=schedule.actions, record_from_start=schedule.record_from_start
    )


def assert_judged(profile: Profile, schedule: Schedule, said: Simulation) -> Verdict:
    """The independent checkers carry the schedule out, and see the bytes and the seconds that were simulated."""
    verdict = check_times(profile, plan_with(profile, schedule), said)
    assert verdict.peak_bytes == said.peak_bytes
    assert verdict.first_step_peak_bytes == said.first_step_peak_bytes
    assert (verdict.out_bytes, verdict.in_bytes) == (said.out_bytes, said.in_bytes)
    return verdict


def held(profile: Profile) -> Plan:
    """The first source is held, and its copy recomputed; all else is kept. The budget is two in-core peaks."""
    made = plan(with_sources(profile), 2 * profile.in_core_peak_bytes)
    place = next(number for number, value in enumerate(made.values) if value.source)
    return with_decisions(profile, made, {made.values[place + 1].name: Decision.RECOMPUTE})


def problems_of(make: Callable[[int], Profile], count: int) -> Iterator[tuple[int, Profile, Problem]]:
    """The first ``count`` seeds, from 0, whose profiles save something; with these and their problems."""
    seed = found = 0
    while found < count:
        profile = make(seed)
        if any(point.kind is PointKind.USE for point in profile.points):
            yield seed, profile, Problem.of(profile)
            found += 1
        seed += 1


def random_decisions(problem: Problem, seed: int) -> list[Decision]:
    rng = random.Random(seed)
    decisions = []
    for value, reason in enumerate(problem.must_keep):
        choices = [Decision.KEEP, Decision.SWAP]
        if problem.replay.replays[value] is not None:
            choices += [Decision.RECOMPUTE, Decision.RECOMPUTE]
        decisions.append(Decision.KEEP if reason else rng.choice(choices))
    return decisions


def random_tuning(problem: Problem, seed: int) -> Tuning:
    """About a third of the values replay early, stay longer and are copied later; all queues in any order."""
    rng = random.Random(seed)
    values = list(range(problem.value_count))
    points = range(len(problem.point_ticks))

    def some(choices: list[int] | range) -> dict[int, int]:
        return {value: rng.choice(choices) for value in rng.sample(values, len(values)) if rng.random() < 0.3}

    def any_order() -> tuple[int, ...]:
        return tuple(rng.sample(values, rng.randint(0, len(values))))

    return Tuning(
        replay_at=some(list(problem.use_points)),
        stay_until=some(points),
        out_from=some(points),
        fetch_from=some(points),
        out_order=any_order(),
        release_order=any_order(),
        fetch_order=any_order(),
    )


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
    first_use = [problem.point_index[point] if point >= 0 else -1 for point in problem.first_use_point]
    actions = random_actions(decisions, first_use, rng, 0.8)
    return Schedule(tuple(decisions), actions, Decision.RECOMPUTE in decisions)
