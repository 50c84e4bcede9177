"""plan_set: one call profiles and plans each shape, and a session follows the plan of each step's shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import InfeasibleError, UsageError
from tests.runtime.besides import WIDTH, fresh
from tests.runtime.nets import LINK

pytestmark = pytest.mark.cpu_device


def step_for(model: nn.Module) -> Callable[[int], Callable[[], torch.Tensor]]:
    def step_of(rows: int) -> Callable[[], torch.Tensor]:
        batch = torch.ones(rows, WIDTH)
        return lambda: model(batch).square().mean()

    return step_of


def planned(model: nn.Module, shapes: list[int], budget: str) -> poochplan.PlanSet:
    return poochplan.plan_set(
        step_for(model), shapes, model=model, budget=budget, evaluations=100, iterations=1, link=LINK
    )


def test_each_step_follows_the_plan_of_its_shape_or_the_next_larger_one() -> None:
    model = fresh()
    plans = planned(model, [128, 256], "90%")
    assert len({plan.budget_bytes for plan in plans.plans}) == 1
    assert plans.plans[0].budget_bytes == int(0.9 * plans.plans[1].prediction.in_core_peak_bytes)
    followed = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with poochplan.apply(plans, model) as session:
            for rows in (128, 256, 200):
                step_for(model)(rows)().backward()
                followed.append(plans.plans.index(session.plan))
                model.zero_grad(set_to_none=True)
    assert followed == [0, 1, 1]
    assert session.report().steps_followed == 3


def test_what_cannot_be_planned_is_one_clear_line() -> None:
    model = fresh()
    with pytest.raises(UsageError, match="expected at least one shape, found none"):
        planned(model, [], "60%")
    with pytest.raises(UsageError, match=r"expected step_for\(3\) to give a function .*, found Tensor"):
        poochplan.plan_set(lambda rows: torch.ones(rows), [3], model=model, budget="60%")  # type: ignore[arg-type,return-value]
    with pytest.raises(InfeasibleError, match="shape 256: no plan fits a budget of") as raised:
        planned(model, [16, 256], "30%")
    assert raised.value.smallest_budget_bytes > 0
