"""The evaluator against the simulator it stands for: the same seconds, to the bit, and the same bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning import NETWORKS, budget_of, instance
from poochplan.errors import PoochError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.evaluator import compiled
from poochplan.planner.evaluator.codes import STYLE_OF, codes_of, decisions_of, style_code
from poochplan.planner.evaluator.evaluate import Evaluation, Evaluator, evaluate, warm_up
from poochplan.planner.evaluator.layout import KEY
from poochplan.planner.evaluator.scratch import ENTRIES, LEAST_ROOM
from poochplan.planner.judge.candidate import swap_all, try_style
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.style import Style
from tests.depth import DEEP, seeds, tries
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import random_profile, transformer_like, with_random_thread

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
        try:
            yield seed, profile, build_problem(profile)
            found += 1
        except PoochError:  # nothing is saved
            pass
        seed += 1


def simulated(
    problem: Problem, wish: Sequence[Decision], budget_bytes: int, style: Style
) -> tuple[Evaluation, tuple[Decision, ...]]:
    found = try_style(problem, "x", wish, budget_bytes, style, recorded=False)
    moved_bytes = found.simulation.out_bytes + found.simulation.in_bytes
    return Evaluation(found.simulation.step_s, found.peak_bytes, moved_bytes), found.schedule.decisions


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
    for seed, profile, problem in random_problems(tries(80, 1250)):
        lanes.add(None if problem.lane is None else (problem.lane.is_compute, problem.lane.record_s > 0))
        link = problem.link
        links.add((link.duplex < 1, link.interference_out > 0, link.interference_in > 0))
        rng, evaluator = random.Random(seed), Evaluator(problem)
        for wish in (random_decisions(problem, seed), swap_all(problem)):
            budget_bytes = int(profile.in_core_peak_bytes * rng.uniform(0.1, 1.0))
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
    for seed in seeds(4, 40):
        profile = with_random_thread(random_profile(seed, 150), seed)
        problem = build_problem(profile)
        evaluator = Evaluator(problem)
        for share in (0.8, 0.4):
            wish = random_decisions(problem, seed)
            assert_same(problem, evaluator, wish, int(profile.in_core_peak_bytes * share))


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


def test_without_numba_plain_python_gives_the_same() -> None:
    said = run_python(
        """
        import sys
        sys.modules["numba"] = None
        from poochplan.planner.evaluator.compiled import is_compiled
        from poochplan.planner.evaluator.evaluate import Evaluator, evaluate, warm_up
        from tests.planner.evaluator.test_evaluator import assert_same, random_decisions, random_problems
        assert not is_compiled() and evaluate.__class__.__name__ == "function"
        for seed, profile, problem in random_problems(9):
            assert_same(problem, Evaluator(problem), random_decisions(problem, seed), profile.in_core_peak_bytes // 2)
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
