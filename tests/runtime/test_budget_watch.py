"""A step that takes more than its plan's budget is never passed over in silence while it is metered."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.metering.census import LEAST_BYTES
from tests.runtime.besides import HELD_BYTES, Cyclic, State, in_an_attribute, live, no_collector, nowhere, with_step
from tests.runtime.nets import CASES, LINK
from tests.runtime.served import needs_compiler

Keep = Callable[[Cyclic, State], object]
BUDGET = "poochplan: a step that follows the plan took [0-9]+ bytes, more than its budget of [0-9]+ "


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, step, optimizer = with_step(Cyclic(nowhere))
    profile = poochplan.profile(step, model=model, optimizer=optimizer, iterations=1, link=LINK)
    # As without the compiled allocator: then not every step is metered.
    return live(poochplan.plan(profile, smallest_budget(profile, arena="off"), evaluations=100, arena="off"))


def peaks(plan: Plan, keep: Keep, steps: int, after_each: Callable[[], object] = int) -> list[int | None]:
    """The metered peaks of some steps, in which Python's collector does not run by itself."""
    model, step, optimizer = with_step(Cyclic(keep))
    found = []
    with no_collector(), poochplan.apply(plan, model) as session:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
            found.append(session.report().last_step.peak_bytes)
            after_each()
        assert session.report().total.fallbacks == 0
    return found


@pytest.mark.parametrize("keep", [nowhere, in_an_attribute])
def test_garbage_that_takes_a_step_above_the_budget_is_told_once(plan: Plan, keep: Keep) -> None:
    with pytest.warns(RuntimeWarning, match=BUDGET) as told:
        found = peaks(plan, keep, 4)
    assert len([warning for warning in told if "budget" in str(warning.message)]) == 1
    assert found[1] > plan.budget_bytes
    assert str(found[1]) in str(told[0].message)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_first_step_is_within_the_budget_and_so_is_each_after_a_collection(plan: Plan) -> None:
    found = peaks(plan, nowhere, 3, gc.collect)
    assert max(found[0], found[1]) <= plan.prediction.peak_bytes <= plan.budget_bytes
    assert found[2] is None  # nothing grows, so no more is metered


def test_steps_that_grow_are_metered_until_they_are_above_the_budget(plan: Plan) -> None:
    roomy = msgspec.structs.replace(plan, budget_bytes=plan.prediction.peak_bytes + 2 * HELD_BYTES)
    with pytest.warns(RuntimeWarning, match=BUDGET):
        found = peaks(roomy, nowhere, 6)
    over = [peak is not None and peak > roomy.budget_bytes for peak in found]
    assert over == [False, False, False, True, False, False]
    assert found[4:] == [None, None]


def test_a_last_step_above_the_budget_is_told_at_the_end_of_the_block(plan: Plan) -> None:
    tight = msgspec.structs.replace(plan, budget_bytes=plan.prediction.peak_bytes // 2)
    model, step, _ = with_step(Cyclic(nowhere))
    with pytest.warns(RuntimeWarning, match=BUDGET), poochplan.apply(tight, model):
        step().backward()


@needs_compiler
@pytest.mark.parametrize("every", [3, 5])
def test_excesses_in_each_nth_step_are_told_though_the_steps_between_are_within_the_budget(every: int) -> None:
    case = CASES["residual"]
    plan = poochplan.plan(case.profile(), "90%", policy="greedy", arena="off")
    model, step, optimizer = case.fresh()
    with pytest.warns(RuntimeWarning, match=BUDGET), poochplan.apply(plan, model):
        for number in range(40):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            if number % every == every - 1:
                torch.empty(plan.budget_bytes).fill_(0)
            optimizer.step()


class Halves(torch.nn.Module):
    """Two networks, whose losses have a backward each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(rows), self.second(rows)


@needs_compiler
@pytest.mark.parametrize("arena", ["auto", "off"])
def test_a_call_without_gradients_between_two_backwards_does_not_end_the_watch(arena: Any) -> None:
    model, rows, extra_bytes = Halves(), torch.randn(256, 64), 0

    def step() -> None:
        first, second = (half.square().mean() for half in model(rows))
        first.backward()
        with torch.no_grad():
            model(rows[:8])
        extra = torch.empty(extra_bytes, dtype=torch.uint8)
        second.backward()
        del extra
        model.zero_grad()

    profile = poochplan.profile(step, model=model, backward="inside", iterations=1, link=LINK)
    plan = poochplan.plan(profile, "90%", evaluations=100, arena=arena)
    with pytest.warns(RuntimeWarning, match=BUDGET), poochplan.apply(plan, model):
        for number in range(4):
            extra_bytes = (8 << 20) * (number > 1)
            step()


@needs_compiler
@pytest.mark.cpu_device
def test_a_step_above_its_budget_with_an_arena_is_told_with_what_lives_beside_and_is_within_it_from_then_on() -> None:
    model, step, optimizer = CASES["residual"].fresh()
    profile = poochplan.profile(step, model=model, optimizer=optimizer, iterations=1, link=LINK)
    plan = poochplan.plan(profile, smallest_budget(profile, arena="on"), evaluations=50, arena="on")
    found = plan.prediction
    assert found.arena_peak_bytes is not None
    gaps_bytes = found.arena_peak_bytes - found.peak_bytes
    assert gaps_bytes > LEAST_BYTES
    beside_bytes = plan.budget_bytes - found.arena_peak_bytes + max(gaps_bytes // 2, LEAST_BYTES)  # smaller: not seen
    found_peaks, beside = [], None
    with pytest.warns(RuntimeWarning) as told, poochplan.apply(plan, model, quiet=True, meter="always") as session:
        for number in range(9):
            if number == 5:
                beside = torch.ones(beside_bytes // 4)
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
            found_peaks.append(session.last.peak_bytes)
    assert beside is not None
    assert [peak > plan.budget_bytes for peak in found_peaks] == [number == 5 for number in range(9)]
    (said,) = [str(one.message) for one in told if "poochplan" in str(one.message)]
    assert said.startswith(f"poochplan: a step that follows the plan took {found_peaks[5]} bytes, more than its budget")
    assert "; in addition to the prediction there are " in said
    assert re.search("; planned steps take their memory from (a smaller arena|torch's allocator) from now on", said)
