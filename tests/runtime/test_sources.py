"""A source that its step writes is held by no plan; one that is written against the plan gives no wrong gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.sources import WIDENING, sources_of
from poochplan.torch_private import tensor_internals
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.nets import Case, followed

KEEP, SWAP, RECOMPUTE = Decision


class WrittenLater(nn.Module):
    """Writes what a copy is made of: never, right behind the copy, or once the copy is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(32, 32), "never"

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        narrow = self.linear(batch).to(torch.bfloat16) * 0.5
        wide = narrow.float()
        if self.when == "before the save":
            narrow.mul_(2)
        squared = wide * wide
        if self.when == "after the save":
            narrow.mul_(2)
        return squared + narrow.sum(-1, keepdim=True)


def _written(when: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch, model = torch.randn(16, 32), WrittenLater()
    model.when = when
    return model, lambda model: model(batch).square().mean()


@pytest.mark.parametrize("when", ["before the save", "after the save"])
def test_a_source_that_its_step_writes_later_is_held_by_no_plan(when: str) -> None:
    assert sources_of(Case(lambda: _written(when)).profile()) == {}
    assert len(sources_of(Case(lambda: _written("never")).profile())) == 1


@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_a_source_that_is_written_against_the_plan_gives_no_wrong_gradients(decision: Decision) -> None:
    case = Case(lambda: _written("never"))
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.until >= 0 for value in plan.values) == 1
    followed(case, plan)
    for when in ("before the save", "after the save"):
        model, loss_of = _written(when)
        loss_of(model).backward()
        wanted = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        with poochplan.apply(plan, model):
            refused = _refused(loss_of(model))
        assert not refused or ("modified by an inplace operation" in refused and when == "after the save")
        found = [parameter.grad for parameter in model.parameters()]
        assert refused or all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def _refused(loss: torch.Tensor) -> str:
    """The error of its backward; empty without one."""
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_profile_and_runtime_know_the_same_ops_that_widen() -> None:
    assert {str(op) for op in tensor_internals.WIDENING} == WIDENING
