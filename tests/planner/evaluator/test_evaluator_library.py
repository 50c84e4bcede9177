"""The compiled evaluator is built beside whatever runs, and where it cannot be, planning goes on in plain Python."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

from poochplan.errors import NativeError
from poochplan.formats.plan import Plan
from poochplan.planner.planning import NO_EVALUATOR, plan
from poochplan.planner.simulator import evaluator
from poochplan.planner.simulator.evaluator import EVALUATOR, Evaluator, library
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.sweep import Solving, sweep
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import transformer_like, unet_like
from tests.processes import without_compiler

from .test_evaluator import assert_same


@pytest.fixture(scope="module")
def built(compiled_evaluator: None) -> Path:
    """The library, in the user's cache."""
    return EVALUATOR.build()


@pytest.fixture(scope="module")
def expected(built: Path) -> Plan:
    assert library(None) is not None
    return planned()


@pytest.fixture
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As on a fresh machine; the folder of its caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(evaluator, "_loading", evaluator._Loading())
    monkeypatch.setattr(EVALUATOR, "_is_told", False)
    return tmp_path


def compiler(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


LAST = "for last; do :; done"
"""The file that the compiler is to write."""


def once_asked(folder: Path) -> str:
    return f"while [ ! -e {folder}/go ]; do sleep 0.01; done"


def planned() -> Plan:
    return plan(unet_like(2), "70%", evaluations=60, gap=-1.0, arena="off")


def test_what_is_built_is_there_at_once_and_is_not_built_again(
    built: Path, nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, f"{LAST}; cp {built} $last"))
    file = EVALUATOR.build()
    monkeypatch.setenv("CXX", compiler(nothing_loaded, "exit 1"))
    assert library() is not None
    assert EVALUATOR.build() == file


def test_a_slow_compiler_is_not_waited_for(nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, f"{once_asked(nothing_loaded)}; exit 1"))
    began_s = time.perf_counter()
    assert library() is None
    assert library(0.01) is None
    assert time.perf_counter() - began_s < 5
    (nothing_loaded / "go").touch()
    assert library(None) is None
    assert "could not build the evaluator" in evaluator._loading.failure


def test_evaluations_go_over_to_the_library_once_it_is_there(
    built: Path, nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, f"{once_asked(nothing_loaded)}; {LAST}; cp {built} $last"))
    problem = Problem.of(transformer_like(2))
    evaluator, wish = Evaluator(problem), random_decisions(problem, 1)
    before = assert_same(problem, evaluator, wish, 1 << 24)
    assert evaluator.handle is None
    (nothing_loaded / "go").touch()
    assert library(None) is not None
    assert assert_same(problem, evaluator, wish, 1 << 24) == before
    assert evaluator.handle is not None


@pytest.mark.parametrize("text", ["exit 1", "exit 0", f"{LAST}; echo no library > $last"])
def test_with_a_compiler_that_fails_plans_are_the_same(
    expected: Plan, nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, text))
    with pytest.warns(UserWarning, match="without it plans are found about a hundred times more slowly; "):
        found = planned()
    assert evaluator._loading.failure
    assert NO_EVALUATOR in found.notes
    assert NO_EVALUATOR not in expected.notes
    assert (found.prediction, found.values, found.schedule) == (
        expected.prediction,
        expected.values,
        expected.schedule,
    )


def test_a_failed_build_is_told_once_in_a_process_and_stands_in_the_notes_of_each_plan(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, "echo 'a.h:1:2: error: no; such' >&2; exit 1"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        notes = [planned().notes for _ in range(3)]
    (line,) = [str(one.message) for one in told]
    assert line == (
        f"poochplan: {nothing_loaded}/compiler could not build the evaluator: a.h:1:2: error: no, such; without it "
        "plans are found about a hundred times more slowly; set CXX to another compiler, and try it with pooch doctor "
        "--build"
    )
    assert Path(told[0].filename) == Path(__file__)
    assert all(found.count(NO_EVALUATOR) == 1 for found in notes)


def test_a_build_that_still_runs_at_the_end_of_a_plan_is_not_told_as_failed(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, f"{once_asked(nothing_loaded)}; exit 1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan(unet_like(2), "70%", time_limit_s=0.2, arena="off")
    assert NO_EVALUATOR in found.notes
    (nothing_loaded / "go").touch()
    with pytest.warns(UserWarning, match="could not build the evaluator: it says nothing; "):
        planned()


def test_a_plan_that_was_not_searched_for_has_no_such_note(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, f"{once_asked(nothing_loaded)}; exit 1"))
    assert NO_EVALUATOR not in plan(unet_like(2), "100%", arena="off").notes
    (nothing_loaded / "go").touch()


def test_a_sweep_in_several_processes_tells_it_once(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler(nothing_loaded, "exit 1"))
    solving = Solving(time_limit_s=0.5, arena="off")
    with pytest.warns(UserWarning, match="could not build the evaluator") as told:
        sweep(unet_like(1), [1 << 40, 1 << 41], ["greedy"], solving=solving, processes=2)
    assert len(told) == 1
    assert capfd.readouterr().err == ""


def test_a_failure_is_kept_for_reports_until_the_compiler_is_another(
    built: Path, nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", path := compiler(nothing_loaded, "exit 1"))
    assert EVALUATOR.last_failure() == ""
    with pytest.raises(NativeError) as error:
        EVALUATOR.build()
    assert EVALUATOR.last_failure() == str(error.value) == f"{path} could not build the evaluator: it says nothing"
    monkeypatch.setenv("CXX", f"{path} -O1")
    assert EVALUATOR.last_failure() == ""
    monkeypatch.setenv("CXX", path)
    assert EVALUATOR.last_failure()
    compiler(nothing_loaded, f"{LAST}; cp {built} $last")
    assert EVALUATOR.last_failure() == ""
    assert EVALUATOR.build().exists()
    assert not list(nothing_loaded.rglob("*.failed"))
    compiler(nothing_loaded, "exit 1")
    assert EVALUATOR.last_failure() == ""


def test_a_cache_that_cannot_be_written_is_none(nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nothing_loaded / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_loaded / "file"))
    monkeypatch.setenv("CXX", compiler(nothing_loaded, "exit 1"))
    assert library(None) is None
    assert "cannot be made" in evaluator._loading.failure


def test_without_a_compiler_the_simulator_stands_in() -> None:
    code = """
        from tests.planner.evaluator.test_evaluator import Evaluator, assert_same, random_decisions, random_problems
        for seed, profile, problem in random_problems(9):
            assert_same(problem, Evaluator(problem), random_decisions(problem, seed), profile.in_core_peak_bytes // 2)
        print("same")
    """
    assert without_compiler(code) == "same\n"
