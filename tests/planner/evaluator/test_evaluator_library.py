"""The compiled evaluator is built beside whatever runs, and where it cannot be, planning goes on in plain Python."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from poochplan.formats.plan import Plan
from poochplan.planner.planning import plan
from poochplan.planner.simulator import evaluator
from poochplan.planner.simulator.evaluator import EVALUATOR, Evaluator, library
from poochplan.planner.simulator.problem import build_problem
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import transformer_like, unet_like
from tests.processes import without_compiler

from .test_evaluator import assert_same


@pytest.fixture(scope="module")
def built() -> Path:
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
    problem = build_problem(transformer_like(2))
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
    found = planned()
    assert evaluator._loading.failure
    assert (found.prediction, found.values, found.schedule) == (
        expected.prediction,
        expected.values,
        expected.schedule,
    )


def test_a_cache_that_cannot_be_written_is_none(nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nothing_loaded / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_loaded / "file"))
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
