"""The evaluator against the simulator it stands for: the same seconds, to the bit, and the same bytes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.planning import NETWORKS, budget_of, instance
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile
from poochplan.native import NativeBuild
from poochplan.planner.simulator.evaluator import (
    EVALUATOR,
    STYLE_OF,
    Evaluation,
    Evaluator,
    address,
    addresses,
    codes_of,
    flat_problem_of,
)
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import swap_all, try_style
from poochplan.planner.simulator.streams import Streams
from tests.depth import DEEP, seeds, tries
from tests.planner.plans import problems_of, random_decisions
from tests.planner.random_profiles import link, random_profile, transformer_like, with_random_thread

KEY = 12
"""Column of ``FlatProblem.values``: ``Value::key``."""


pytestmark = pytest.mark.usefixtures("compiled_evaluator")


def any_profile(seed: int) -> Profile:
    """Of up to 45 ops; two in three have a launching thread, on the CPU or ahead of a device."""
    profile = random_profile(seed, 3 + seed % 43)
    profile = with_random_thread(profile, seed) if seed % 3 else profile
    return with_busy_backward(profile, seed) if seed % 4 else profile


random_problems = partial(problems_of, any_profile)


def with_busy_backward(profile: Profile, seed: int) -> Profile:
    """The profile with much workspace in backward, so that values leave there too, while others come back already."""
    rng = random.Random(f"backward {seed}")
    most_bytes = max(value.size_bytes for value in profile.values)
    ops = [
        msgspec.structs.replace(op, workspace_bytes=rng.randint(0, 3 * most_bytes) * rng.randint(0, 1))
        if op.phase is Phase.BACKWARD
        else op
        for op in profile.ops
    ]
    return msgspec.structs.replace(profile, ops=tuple(ops))


def random_budget(problem: Problem, rng: random.Random) -> int:
    """Between nothing and all; every other one is such that bytes can come out even."""
    most_bytes = int(problem.base_bytes.max() + problem.rounded_bytes.sum())
    return int(most_bytes * rng.uniform(0.1, 1.0)) // 512 * 512 + rng.choice((0, 1))


def assert_same(
    problem: Problem, evaluator: Evaluator, wish: Sequence[Decision], budget_bytes: int
) -> list[Evaluation]:
    found = []
    for style in STYLE_OF:
        wanted = try_style(problem, "x", wish, budget_bytes, style)
        said = wanted.simulation
        found.append(evaluator.evaluate(wish, budget_bytes, style))
        assert found[-1] == Evaluation(said.step_s, wanted.peak_bytes, said.out_bytes + said.in_bytes, said.replay_s)
        assert evaluator.decisions == wanted.schedule.decisions
    return found


def test_any_decisions_give_what_the_simulator_says_to_the_bit() -> None:
    lanes: set[tuple[bool, bool] | None] = set()
    fits: set[bool] = set()
    links: set[tuple[bool, bool, bool]] = set()
    for seed, profile, problem in random_problems(tries(100, 1250)):
        cost = problem.launch_cost
        lanes.add(None if profile.runtime is None else (cost.is_compute, cost.record_s > 0))
        line = problem.link
        links.add((line.duplex < 1, line.interference_out > 0, line.interference_in > 0))
        rng, evaluator = random.Random(seed), Evaluator(problem)
        for wish in (random_decisions(problem, seed), swap_all(problem)):
            budget_bytes = random_budget(problem, rng)
            for result in assert_same(problem, evaluator, wish, budget_bytes):
                fits.add(result.peak_bytes <= budget_bytes)
    assert lanes == {None, (True, True), (True, False), (False, True), (False, False)}
    assert fits == {True, False}
    assert len(links) == 8


@pytest.mark.parametrize("network", NETWORKS if DEEP else ("seq2seq", "unet3d-192"))
def test_networks_give_what_the_simulator_says(network: str) -> None:
    profile = instance(network, "pcie3")
    problem = Problem.of(profile)
    evaluator = Evaluator(problem)
    for seed in seeds(1, 5):
        for kept in (0.7, 0.2):
            for wish in (random_decisions(problem, seed), swap_all(problem)):
                assert_same(problem, evaluator, wish, budget_of(profile, kept))


def test_large_steps_with_a_launching_thread_give_what_the_simulator_says() -> None:
    for seed in seeds(6, 40):
        problem = Problem.of(with_busy_backward(with_random_thread(random_profile(seed, 150), seed), seed))
        rng, evaluator = random.Random(seed), Evaluator(problem)
        for more in range(3):
            assert_same(problem, evaluator, random_decisions(problem, 10 * seed + more), random_budget(problem, rng))


def test_replays_are_told_apart_by_their_targets_and_not_by_a_hash_and_merged_again_once_forgotten() -> None:
    for seed, profile, problem in random_problems(tries(8, 100)):
        flat = flat_problem_of(problem)
        flat.values[:, KEY] = 0
        for evaluator in (Evaluator(problem, flat), Evaluator(problem, pooled=0), Evaluator(problem, pooled=40)):
            for more in range(4):
                wish = random_decisions(problem, 10 * seed + more)
                assert_same(problem, evaluator, wish, profile.in_core_peak_bytes // 2)


COMMAND = np.dtype([("what", "i8"), ("value", "i8"), ("queue", "i8"), ("work_s", "f8")])
QUEUE, COMPUTE, WAIT = range(3)


def test_random_copies_and_work_take_the_time_that_streams_say() -> None:
    """Schedules hardly ever have copies both ways beside each other."""
    flags = (*EVALUATOR.flags, f"-I{EVALUATOR.sources}")
    clock = ctypes.CDLL(str(NativeBuild("clock", Path(__file__).parent / "native", flags).build()))
    for seed, _, problem in random_problems(tries(20, 200)):
        rng = random.Random(seed)
        both = link(duplex=rng.choice([0.3, 0.7]), interference_out=rng.choice([0, 0.3]), interference_in=0.5)
        flat, streams = flat_problem_of(problem), Streams(both, trace=False)
        flat.rates[:3] = both.duplex, both.interference_out, both.interference_in
        flat.copy_s[:] = [(rng.random(), rng.random()) for _ in flat.values]
        commands, expected = [], []

        def add(*command: float, commands: Any = commands, expected: Any = expected, streams: Any = streams) -> None:
            commands.append(command)
            expected.append((streams.now_s, streams.stall_s, streams.interference_s))

        for value in range(problem.value_count):
            streams.queue(value, flat.copy_s[value, 0], "", is_out=True)
            add(QUEUE, value, 0, 0.0)
            if rng.random() < 0.5:
                streams.queue(value, flat.copy_s[value, 1], "", is_out=False)
                add(QUEUE, value, 1, 0.0)
            work_s = rng.random()
            streams.compute(work_s)
            add(COMPUTE, 0, 0, work_s)
            if rng.random() < 0.3:
                streams.wait(value, "", is_out=True)
                add(WAIT, value, 0, 0.0)
        arrays, given = addresses(flat), np.array(commands, dtype=COMMAND)
        found = np.zeros((len(commands), 3))
        pointers = (ctypes.c_void_p(address(array)) for array in (arrays, given, found))
        layout_at, given_at, found_at = pointers
        clock.run(layout_at, given_at, ctypes.c_int64(len(commands)), found_at)
        assert list(map(tuple, found.tolist())) == expected


def test_other_threads_run_beside_an_evaluation() -> None:
    from concurrent.futures import ThreadPoolExecutor

    problem = Problem.of(transformer_like(4))
    wishes = [random_decisions(problem, seed) for seed in range(16)]

    def all_of_them() -> list[Evaluation]:
        own = Evaluator(problem)
        return [own.evaluate_codes(codes_of(wish).tobytes(), 1 << 24, 0) for wish in wishes]

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(all_of_them) for _ in range(4)]
        assert all(each.result() == found[0].result() for each in found)
