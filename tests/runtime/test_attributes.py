"""What user code has set on a tensor is on the saved tensor in backward, exactly as without a session."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from tests.runtime.nets import Case, followed, of
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device

EVERY_WAY = {"kept": (1, 0, 0), "swapped": (0, 1, 0), "recomputed": (0, 0, 1)}


class Quantised(torch.autograd.Function):
    """Its backward divides by the ``step`` that somebody has set on what it saved; 1 if nobody has."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.sin(tensors[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        first, *others = ctx.saved_tensors
        steps = [getattr(one, "step", 1.0) for one in (first, *others)]
        return (grad * torch.cos(first) / sum(steps), *(None for _ in others))


class Layers(nn.Module):
    """``mark(hidden, weight)`` returns what the function gets, and may set attributes on it."""

    def __init__(self, mark: Callable[..., Any], after: Callable[..., Any] = lambda *_: None) -> None:
        super().__init__()
        self.inner, self.outer, self.mark, self.after = nn.Linear(24, 24), nn.Linear(24, 3), mark, after

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(batch))
        given = self.mark(hidden, self.inner.weight)
        made = Quantised.apply(*given)
        self.after(given, made)
        return self.outer(made * torch.sigmoid(hidden))  # type: ignore[no-any-return]


def _before(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    hidden.step = 3.0
    return (hidden,)


def _on_a_view(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    part, whole = hidden[:, :12], hidden
    part.step = 5.0
    return whole, part, hidden.T


def _after(given: Any, made: torch.Tensor) -> None:
    given[0].step = 7.0


def _of_the_weight(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    weight.step = 2.5
    return hidden, weight


def _on_constants(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    marked, plain = hidden.detach().round(), hidden.detach().square()
    marked.step = 0.5
    return hidden, plain, marked


def _on_its_result(given: Any, made: torch.Tensor) -> None:
    made.step = 9.0  # autograd saves results without attributes


NETWORKS = {
    "set before": lambda: Layers(_before),
    "set on a view": lambda: Layers(_on_a_view),
    "set after": lambda: Layers(lambda hidden, _: (hidden,), _after),
    "of the weight": lambda: Layers(_of_the_weight),
    "on constants": lambda: Layers(_on_constants),
    "on the result": lambda: Layers(lambda hidden, _: (hidden,), _on_its_result),
    "on none": lambda: Layers(lambda hidden, _: (hidden,)),
}
CASES = {name: of(build, 16, 24) for name, build in NETWORKS.items()}


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("name", CASES)
def test_attributes_come_back(name: str, way: str) -> None:
    case = CASES[name]
    followed(case, random_plan(case.profile(), 0, EVERY_WAY[way]))


def test_attributes_are_there_in_profiled_steps() -> None:
    case = CASES["set before"]
    model, step, optimizer = case.fresh()
    step().backward()
    wanted = model.inner.weight.grad.clone()
    optimizer.zero_grad()
    with poochplan.auto(model, optimizer, budget="80%", quiet=True):
        step().backward()
    assert torch.equal(model.inner.weight.grad, wanted)


class Fused(torch.autograd.Function):
    """As fused gradient accumulation does: adds to the weight's ``total``, and tells the loop by an attribute."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(batch, weight)
        return batch @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        batch, weight = ctx.saved_tensors
        weight.total.add_(grad.T @ batch)
        weight.is_added = isinstance(weight, nn.Parameter)
        return grad @ weight, None


class Accumulating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(24, 24), nn.Parameter(torch.randn(8, 24))
        self.weight.total = torch.zeros(8, 24)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return Fused.apply(self.inner(batch).tanh(), self.weight)  # type: ignore[no-any-return]


def test_backward_reaches_the_weight_itself() -> None:
    case: Case = of(Accumulating, 16, 24)
    plan = random_plan(case.profile(), 0, EVERY_WAY["swapped"])
    totals = []
    for given in (None, plan):
        model, step, _ = case.fresh()
        if given is None:
            step().backward()
        else:
            with poochplan.apply(given, model):
                step().backward()
        assert model.weight.is_added
        totals.append(model.weight.total)
    assert torch.equal(*totals)
    assert totals[0].any()


class SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.exp(tensor)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (made,) = ctx.saved_tensors
        return grad * made * getattr(made, "factor", 1.0)


class NamesItself(nn.Module):
    """A result refers to itself by an attribute, and so to its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(24, 24), []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made = SavesItsResult.apply(self.inner(batch))
        made.itself, made.factor = made, 2.0
        self.seen.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]


def test_no_graph_is_held_by_an_attribute() -> None:
    case = of(NamesItself, 16, 24)
    plan = random_plan(case.profile(), 0, EVERY_WAY["kept"])
    followed(case, plan)
    model, step, _ = case.fresh()
    with poochplan.apply(plan, model):
        step()  # its graph is dropped without a backward
        gc.collect()
        assert model.seen[-1]() is None
        step().backward()
