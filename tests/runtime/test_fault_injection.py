"""Each of our functions may raise while a loop runs: the loop goes on. A share of them, another one each week;
``benchmarks/fault_injection.py`` has them all.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import pytest

import poochplan
from tests.depth import tries
from tests.runtime.inference.passes import KINDS
from tests.runtime.injecting import (
    FaultError,
    Loop,
    Place,
    Watch,
    automatic,
    filled_cache,
    passes,
    places,
    plainly,
    planned,
    run,
)
from tests.runtime.nets import CASES
from tests.runtime.random_plans import random_plan

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

CASE = CASES["residual"]
WEEK = datetime.date.today().isocalendar().week


def share(watch: Watch, of: int, least: int) -> list[Place]:
    """One place in so many, of this week."""
    every = places(watch)
    assert len(every) > least
    return every[WEEK % of :: of]


def holds(loop: Loop, plain: Loop, of: int, least: int = 300) -> None:
    wanted, _ = run(plain)
    assert not wanted.error
    seen, watch = run(loop)
    assert not seen.why_not(wanted)
    wrong = {str(place): why for place in share(watch, of, least) if (why := run(loop, place)[0].why_not(wanted))}
    assert not wrong


def test_under_a_plan_that_keeps_swaps_and_replays() -> None:
    plan = random_plan(CASE.profile(), 1)
    assert len({value.decision for value in plan.values}) == 3
    holds(planned(CASE, 3, plan), plainly(CASE, 3), tries(90, 1))


def test_while_steps_are_studied() -> None:
    holds(automatic(CASE, 13, None, "70%"), plainly(CASE, 13), tries(600, 20))


def test_under_a_plan_of_an_earlier_run(tmp_path: Path) -> None:
    filled_cache(CASE, tmp_path, "75%")
    holds(automatic(CASE, 4, tmp_path, "75%"), plainly(CASE, 4), tries(120, 2))


def test_in_passes_from_an_arena() -> None:
    kind = KINDS["convolutions"]
    loop = passes(kind, 6, poochplan.arena)
    run(loop)  # what is done once in a process
    holds(loop, passes(kind, 6, lambda _: contextlib.nullcontext()), tries(20, 1), least=80)


def test_a_fault_is_really_raised_there_and_told_once() -> None:
    plan = random_plan(CASE.profile(), 1)
    seen, _ = run(planned(CASE, 2, plan), Place("runtime/step_policies/follow.py", "Follow.at_save", "forward", 2))
    assert seen.was_reached
    (line,) = seen.said
    assert line.startswith("poochplan: the session stands aside, because something of ours has failed: FaultError: inj")
    assert "follow.py" in line
    assert FaultError.__name__ in line
