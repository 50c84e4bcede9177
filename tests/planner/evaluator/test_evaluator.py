"""The evaluator against the simulator it stands for: the same seconds, to the bit, and the same bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.planning import NETWORKS, budget_of, instance
from poochplan.errors import PoochError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.evaluator import compiled
from poochplan.planner.evaluator.codes import STYLE_OF, codes_of, decisions_of, style_code
from poochplan.planner.evaluator.elapsed import compute, queue_copy, wait_for
from poochplan.planner.evaluator.evaluate import Evaluation, Evaluator, evaluate, warm_up
from poochplan.planner.evaluator.layout import KEY
from poochplan.planner.evaluator.scratch import ENTRIES, INTERFERENCE_S, LEAST_ROOM, NOW_S, STALL_S, start_clock
from poochplan.planner.judge.candidate import swap_all, try_style
from poochplan.planner.judge.streams import Streams
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.style import Style
from tests.depth import DEEP, seeds, tries
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import link, random_profile, transformer_like, with_random_thread

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def _one_process_compiles() -> None:
    warm_up(build_problem(transformer_like(1)))


def random_problems(count: int) -> Iterator[tuple[int, Profile, Problem]]:
    """So many problems of up to 45 ops; two in three have a launching thread, on the CPU or ahead of a device."""
    seed = found = 0
    while found < count:
        profile = random_profile(seed, 3 + seed % 43)
        if seed % 3:
            profile = with_random_thread(profile, seed)
        if seed % 4:
            profile = with_busy_backward(profile, seed)
        try:
            yield seed, profile, build_problem(profile)
            found += 1
        except PoochError:  # nothing is saved
            pass
        seed += 1


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


def simulated(
    problem: Problem, wish: Sequence[Decision], budget_bytes: int, style: Style
) -> tuple[Evaluation, tuple[Decision, ...]]:
    found = try_style(problem, "x", wish, budget_bytes, style, recorded=False)
    moved_bytes = found.simulation.out_bytes + found.simulation.in_bytes
    return Evaluation(
        found.simulation.step_s, found.peak_bytes, moved_bytes, found.simulation.replay_s
    ), found.schedule.decisions


def assert_same(
    problem: Problem, evaluator: Evaluator, wish: Sequence[Decision], budget_bytes: int
) -> list[Evaluation]:
    found = []
    for style in STYLE_OF:
        wanted, decisions = simulated(problem, wish, budget_bytes, style)
        found.append(evaluator.evaluate(wish, budget_bytes, style))
        assert found[-1] == wanted
        assert decisions_of(evaluator.scratch.decisions) == decisions
    return found


def test_any_decisions_give_what_the_simulator_says_to_the_bit() -> None:
    lanes: set[tuple[bool, bool] | None] = set()
    fits: set[bool] = set()
    links: set[tuple[bool, bool, bool]] = set()
    for seed, _, problem in random_problems(tries(100, 1250)):
        lanes.add(None if problem.lane is None else (problem.lane.is_compute, problem.lane.record_s > 0))
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
    problem = build_problem(profile)
    evaluator = Evaluator(problem)
    for seed in seeds(1, 5):
        for kept in (0.7, 0.2):
            for wish in (random_decisions(problem, seed), swap_all(problem)):
                assert_same(problem, evaluator, wish, budget_of(profile, kept))


def test_large_steps_with_a_launching_thread_give_what_the_simulator_says() -> None:
    for seed in seeds(6, 40):
        problem = build_problem(with_busy_backward(with_random_thread(random_profile(seed, 150), seed), seed))
        rng, evaluator = random.Random(seed), Evaluator(problem)
        for more in range(3):
            assert_same(problem, evaluator, random_decisions(problem, 10 * seed + more), random_budget(problem, rng))


def test_replays_are_told_apart_by_their_targets_and_not_by_a_hash() -> None:
    for seed, profile, problem in random_problems(tries(8, 100)):
        evaluator = Evaluator(problem)
        evaluator.layout.values[:, KEY] = 0
        for more in range(3):
            assert_same(
                problem, evaluator, random_decisions(problem, 10 * seed + more), profile.in_core_peak_bytes // 2
            )


def test_a_store_of_replays_that_is_full_is_cleared() -> None:
    for seed, profile, problem in random_problems(tries(8, 100)):
        evaluator = Evaluator(problem)
        store = evaluator.scratch.store
        small = store._replace(pool=np.empty(store.counts[LEAST_ROOM], dtype=np.int64))
        evaluator.scratch = evaluator.scratch._replace(store=small)
        most = 0
        for more in range(4):
            assert_same(
                problem, evaluator, random_decisions(problem, 10 * seed + more), profile.in_core_peak_bytes // 2
            )
            most = max(most, int(small.counts[ENTRIES]))
        assert most <= problem.value_count


def test_codes_are_those_of_decisions_and_styles() -> None:
    decisions = (Decision.SWAP, Decision.KEEP, Decision.RECOMPUTE)
    assert decisions_of(codes_of(decisions)) == decisions
    assert [style_code(style) for style in STYLE_OF] == [0, 1, 2, 3]
    assert [style_code(Style()), style_code(Style(in_order=False)), style_code(Style(release="early"))] == [0, 1, 2]


# -- with numba and without -------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    """What ``code`` prints in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=variables,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def same_clocks(seed: int, problem: Problem) -> None:
    """Random copies and work, in plain Python only: schedules hardly ever have copies both ways beside each other."""
    rng = random.Random(seed)
    both = link(duplex=rng.choice([0.3, 0.7]), interference_out=rng.choice([0, 0.3]), interference_in=0.5)
    evaluator = Evaluator(problem)
    layout, clock, streams = evaluator.layout, evaluator.scratch.clock, Streams(both, trace=False)
    layout.rates[:3] = both.duplex, both.interference_out, both.interference_in
    layout.copy_s[:] = [(rng.random(), rng.random()) for _ in layout.values]
    start_clock(layout, evaluator.scratch.decisions, clock)
    for value in range(problem.value_count):
        streams.queue_out(value, layout.copy_s[value, 0], "")
        queue_copy(layout.copy_s, clock, value, 0)
        if rng.random() < 0.5:
            streams.queue_in(value, layout.copy_s[value, 1], "")
            queue_copy(layout.copy_s, clock, value, 1)
        work_s = rng.random()
        streams.compute(work_s)
        compute(layout.rates, layout.copy_s, clock, work_s)
        if rng.random() < 0.3:
            streams.wait_out(value, "")
            wait_for(layout.rates, layout.copy_s, clock, value, 0)
        wanted = streams.now_s, streams.stall_s, streams.interference_s
        assert tuple(clock.seconds[[NOW_S, STALL_S, INTERFERENCE_S]]) == wanted


def test_without_numba_plain_python_gives_the_same() -> None:
    said = run_python(
        """
        import sys
        sys.modules["numba"] = None
        from poochplan.planner.evaluator.compiled import is_compiled
        from poochplan.planner.evaluator.evaluate import Evaluator, evaluate, warm_up
        from tests.planner.evaluator.test_evaluator import assert_same, random_decisions, random_problems, same_clocks
        assert not is_compiled() and evaluate.__class__.__name__ == "function"
        for seed, profile, problem in random_problems(9):
            assert_same(problem, Evaluator(problem), random_decisions(problem, seed), profile.in_core_peak_bytes // 2)
            same_clocks(seed, problem)
        assert warm_up(problem) < 60
        print("same")
        """
    )
    assert said == "same\n"


@pytest.mark.skipif(not compiled.is_compiled(), reason="numba is not installed")
def test_code_is_compiled_anew_when_a_function_that_it_calls_has_changed(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    outer.write_text(
        "from inner import add\nfrom poochplan.planner.evaluator.compiled import compiled\n"
        "@compiled\ndef twice(x):\n    return 2 * add(x)\n"
    )
    said = []
    for change in ("x + 1", "x + 1", "x + 10"):
        inner.write_text(
            f"from poochplan.planner.evaluator.compiled import part\n@part\ndef add(x):\n    return {change}\n"
        )
        said.append(
            run_python(
                f"""
                import sys
                sys.path.insert(0, {str(tmp_path)!r})
                from outer import twice
                print(twice(1), sum(twice.stats.cache_hits.values()))
                """,
                XDG_CACHE_HOME=str(tmp_path / "cache"),
            ).split()
        )
    assert said == [["4", "0"], ["4", "1"], ["22", "0"]]


def test_where_nothing_can_be_written_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path / "file")
    assert compiled.folder_of.__wrapped__(compiled.HERE) is None


def test_other_threads_run_beside_an_evaluation() -> None:
    from concurrent.futures import ThreadPoolExecutor

    problem = build_problem(transformer_like(4))
    wishes = [random_decisions(problem, seed) for seed in range(16)]

    def all_of_them() -> list[tuple[float, int, int]]:
        own = Evaluator(problem)
        return [evaluate(own.layout, own.scratch, 1 << 24, 0, codes_of(wish)) for wish in wishes]

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(all_of_them) for _ in range(4)]
        assert all(each.result() == found[0].result() for each in found)
