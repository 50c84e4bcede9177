"""Graphs that torch's own front end makes keep their bits without Inductor too, wherever saved tensors are moved to."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from poochplan.runtime.compiled.deferred_unpack import deferring, waiting
from poochplan.tensors.modes import uncompiled_hooks
from tests.compiling.eager_graphs import Compiled, Moved, OneGraph, attention, op_by_op, residual
from tests.runtime.graph_nets import Make, same
from tests.runtime.served import needs_compiler

pytestmark = [needs_compiler, pytest.mark.cpu_device]
MAKES: dict[str, Make] = {"residual": residual, "attention": attention}
Hooks = Callable[[torch.nn.Module, Moved], contextlib.AbstractContextManager[object]]


def of_others(_: torch.nn.Module, moved: Moved) -> contextlib.AbstractContextManager[object]:
    return uncompiled_hooks(moved.pack, moved.unpack)


def our_own(model: torch.nn.Module, moved: Moved) -> contextlib.AbstractContextManager[object]:
    """As the runtime wraps its hooks: these are given each tensor at its save point, before the forward goes on."""
    return uncompiled_hooks(*deferring(moved.pack, moved.unpack, moved.may_wait, model, "cpu"))


def none(_: torch.nn.Module, __: Moved) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


STEPS: tuple[Hooks, ...] = (none, of_others, our_own)


class Trained(NamedTuple):
    steps: list[list[torch.Tensor]]
    """After each step: the loss, all gradients and buffers."""
    moved: list[Moved]


def train(compiled: Compiled, hooks: tuple[Hooks, ...]) -> Trained:
    """A step with each of the hooks; behind its forward, all memory that it has packed is spoilt."""
    model, batch = compiled
    found = Trained([], [])
    for step in hooks:
        moved, given = Moved(), batch.clone()
        model.zero_grad(set_to_none=True)
        with step(model, moved):
            loss = model(given)
        spoilt = moved.spoil([loss, *model.parameters(), *model.buffers()])
        assert bool(spoilt) == (step is not none)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.steps.append([one.detach().clone() for one in (loss, *gradients, *model.buffers())])
        found.moved.append(moved)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        del loss
    assert waiting() == 0
    return found


class Stock(NamedTuple):
    """Of torch's own split: what its steps give. Of ours without replays: its notes."""

    make: Make
    steps: list[list[torch.Tensor]]
    noted: OneGraph

    def replayable(self) -> list[str]:
        return self.noted.replayable()[self.noted.key]


@pytest.fixture(scope="module", params=MAKES)
def stock(request: pytest.FixtureRequest) -> Iterator[Stock]:
    make, noted = MAKES[request.param], OneGraph()
    steps = train(op_by_op(make), (none,) * len(STEPS)).steps
    assert_all_as(steps, noted, train(op_by_op(make, noted), STEPS))
    yield Stock(make, steps, noted)
    torch._dynamo.reset()


def assert_all_as(steps: list[list[torch.Tensor]], noted: OneGraph, found: Trained) -> None:
    """These steps, and hooks were given what the graph says that it saves, and nothing else."""
    assert len(found.steps) == len(steps)
    assert all(map(same, found.steps, steps))
    for hooks, moved in zip(STEPS, found.moved, strict=True):
        assert Counter(moved.lies) == (Counter() if hooks is none else Counter(noted.saved.values()))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_replayed_and_moved_away_gradients_keep_their_bits(stock: Stock, seed: int) -> None:
    chance = random.Random(seed)
    names = {one for one in stock.replayable() if seed == 0 or chance.random() < 0.5}
    assert names
    noted = OneGraph({stock.noted.key: names})
    assert_all_as(stock.steps, noted, train(op_by_op(stock.make, noted), STEPS))
    assert set(stock.noted.saved) - set(noted.saved) == names
    assert set(noted.saved) - set(stock.noted.saved) <= noted.static
