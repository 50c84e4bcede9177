"""Compiling on a machine's first use, before a search's time begins."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np

from poochplan.planner.allowance import CountAllowance
from poochplan.planner.effort import Watch
from poochplan.planner.evaluator.codes import KEEP
from poochplan.planner.evaluator.compiled import folder_of, is_compiled, one_at_a_time
from poochplan.planner.evaluator.layout import layout_of
from poochplan.planner.problem.problem import Problem

from .annealing import Walker
from .incumbents import Incumbents

HERE = Path(__file__).parent
_warm = False
_MARK = "complete"


def is_cold() -> bool:
    """Whether searches would begin by compiling, some 30 to 40 s of a processor: on this machine none has yet."""
    folder = folder_of(HERE) if is_compiled() else None
    return folder is not None and not (folder / _MARK).exists()


def warm_up(problem: Problem, watch: Watch | None = None) -> float:
    """Compiles, or loads, what searches run, where this process has not yet; returns the seconds it took.

    ``problem`` is any: its numbers do not matter, the types of its arrays are those of all.
    """
    began_s = time.perf_counter()
    global _warm
    if not _warm:
        if watch is not None and is_compiled():
            watch(None)
        with one_at_a_time():
            walker = Walker(problem, layout_of(problem), range(problem.value_count), Incumbents(problem, 0, None))
            start = walker.try_styles(np.full(problem.value_count, KEEP, dtype=np.int8), "")
            walker.anneal(start, CountAllowance(1), temperature=1.0, seed=0)
            walker.descend(start, CountAllowance(1))
            _mark()
        _warm = True
    return time.perf_counter() - began_s


def _mark() -> None:
    folder = folder_of(HERE) if is_compiled() else None
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / _MARK).touch()
