"""What the nodes of a graph keep lives until the loop lets go of its loss. A plan knows it, in loops that hold their
loss until the next one, and in those that do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile_parts import LOSS_IS_HELD
from poochplan.planner.planning import smallest_budget
from tests.live_bytes import outside_meter
from tests.runtime.nets import our_warnings, taken
from tests.runtime.served import needs_compiler

pytestmark = pytest.mark.cpu_device

WIDTH, BATCH, DEPTH = 48, 512, 4


class Swish(torch.autograd.Function):
    """Keeps a tensor of its own on its node, past all hooks."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        ctx.gate = torch.sigmoid(features)
        return features * ctx.gate

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.gate


class Softplus(torch.autograd.Function):
    """Keeps its result on its node, which the next layer saves too."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        result = nn.functional.softplus(features)
        ctx.result = result.detach()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * (1 - torch.exp(-ctx.result))


def hooked(features: torch.Tensor) -> torch.Tensor:
    """A hook on the result keeps a tensor."""
    scale = torch.rand_like(features).add(0.5)
    result = torch.tanh(features)
    result.register_hook(lambda gradient: gradient * scale)
    return result


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.kind = kind
        self.side = nn.Linear(WIDTH, WIDTH)
        self.seen: Any = None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            features = nn.functional.gelu(layer(features))
            if self.kind == "node":
                features = Swish.apply(features)
            elif self.kind == "node's result":
                features = Softplus.apply(features)
            elif self.kind == "hook":
                features = hooked(features)
            elif self.kind == "attribute" and number == 1:
                self.seen = features.detach().exp()
            elif self.kind == "side branch" and number == 1:
                self.seen = torch.sigmoid(self.side(features))
        return features


KINDS = ("node", "node's result", "hook", "attribute", "side branch")


def made(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net(kind)
    return model, torch.optim.Adam(model.parameters())


def train(model: Net, optimizer: torch.optim.Optimizer, batch: torch.Tensor, *, holds: bool) -> list[bytes]:
    """Five steps; the bytes of the gradients of the last."""
    torch.manual_seed(4)
    for _ in range(5):
        optimizer.zero_grad()
        if holds:
            loss = model(batch).square().mean()
            loss.backward()
        else:
            model(batch).square().mean().backward()
        optimizer.step()
    return [one.grad.numpy().tobytes() for one in model.parameters() if one.grad is not None]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_lives_as_long_as_the_loss_is_planned_for(kind: str) -> None:
    model, optimizer = made(kind)
    batch = torch.randn(BATCH, WIDTH)
    profile = taken(lambda: model(batch).square().mean(), model, optimizer)
    plan = poochplan.plan(profile, smallest_budget(profile, arena="off"), evaluations=50, arena="off")
    assert any(note.startswith(LOSS_IS_HELD) for note in plan.notes)
    for holds in (True, False):
        model.seen = None  # it holds the graph of the last step
        del model, optimizer
        expected = train(*made(kind), batch, holds=holds)
        model, optimizer = made(kind)
        with (
            our_warnings() as told,
            outside_meter() as outside,
            poochplan.apply(plan, model, quiet=True, meter="always", on_divergence="error") as session,
        ):
            found = train(model, optimizer, batch, holds=holds)
        assert told == []
        assert found == expected
        assert outside.peak <= plan.budget_bytes
        if holds:
            assert session.total.peak_bytes == plan.prediction.peak_bytes
        else:
            assert session.total.peak_bytes is not None
            assert session.total.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("kind", ["node", "side branch"])
def test_each_mode_of_a_profile_counts_it(kind: str) -> None:
    model, optimizer = made(kind)
    batch = torch.randn(BATCH, WIDTH)
    modes = ("run", "fake", "swap-all")
    profiles = [taken(lambda: model(batch).square().mean(), model, optimizer, mode=mode) for mode in modes]
    assert len({one.in_core_live_peak_bytes for one in profiles}) == 1
    assert len({smallest_budget(one, arena="off") for one in profiles}) == 1
