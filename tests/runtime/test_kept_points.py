"""Kept values pass points without actions by one short call, which does what the long one does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.kept_points import KeptPoints
from tests.runtime.nets import CASES, followed
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device  # the other device's own mode is on the stack, and then the long way is taken
STEPS = 2


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The save points that were passed by the short call."""
    found: list[int] = []
    original = KeptPoints._first

    def counted(self: KeptPoints, *given: Any) -> Any:
        found.append(self._cursor.segment.saves)
        return original(self, *given)

    monkeypatch.setattr(KeptPoints, "_first", counted)
    return found


def kept(plan: Plan) -> list[int]:
    """The save points of kept values at which nothing else is planned, but for the last."""
    busy = {actions.index for actions in plan.schedule if actions.at == "save"}
    values = enumerate(plan.values[:-1])
    return [index for index, value in values if value.decision is Decision.KEEP and index not in busy]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [(1, 0, 0), (1, 1, 1)])
def test_each_kept_value_without_actions_takes_the_short_call(
    name: str, weights: tuple[float, float, float], short: list[int]
) -> None:
    plan = random_plan(CASES[name].profile(), 0, weights)
    short.clear()
    followed(CASES[name], plan, STEPS)
    assert short == kept(plan) * STEPS
    assert kept(plan)


def test_a_point_with_an_action_takes_the_long_call(short: list[int]) -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (1, 0, 0))
    busy = kept(plan)[1]
    plan = msgspec.structs.replace(plan, schedule=(PointActions(at="save", index=busy, record="off"), *plan.schedule))
    short.clear()
    followed(case, plan, STEPS)
    assert short == kept(plan) * STEPS
    assert busy not in short


def test_unpacks_of_kept_values_take_the_short_call_but_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case, long = CASES["residual"], []
    original = Engine._use_point

    def counted(self: Engine, handle: Any) -> None:
        long.append(handle.ordinal)
        original(self, handle)

    monkeypatch.setattr(Engine, "_use_point", counted)
    plan = random_plan(case.profile(), 0, (1, 0, 0))
    long.clear()
    followed(case, plan, STEPS)
    assert len(long) == STEPS


def test_a_kept_value_that_is_written_raises_what_autograd_raises(short: list[int]) -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (1, 0, 0))
    model, step, _ = case.fresh()
    seen: list[torch.Tensor] = []
    relu = next(module for module in model.modules() if isinstance(module, nn.ReLU))
    relu.register_forward_hook(lambda module, given, result: seen.append(result))
    with poochplan.apply(plan, model):
        loss = step()
        with torch.no_grad():
            seen[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
    assert short
