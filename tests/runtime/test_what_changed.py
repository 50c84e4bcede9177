"""Where a step leaves its plan the message says what has changed and what to do, and cites the line of the user's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import DivergenceError
from poochplan.formats.plan import Plan
from tests.runtime import besides
from tests.runtime.besides import BATCH, WIDTH, Layers, fresh, profiled
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device

INTERNAL = re.compile(r"outside the model\)|another save|no further save|use point|said once|before/")
Step = Callable[[nn.Module], None]


class Dropped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.drop(self.layers[:2](batch)))


def _batch(rows: int = BATCH, width: int = WIDTH) -> torch.Tensor:
    return torch.ones(rows, width)


def _another_loss(model: nn.Module) -> None:
    model(_batch()).exp().sigmoid().sum().backward()


def _replaced(model: nn.Module) -> None:
    model.layers[1][1] = nn.SiLU()
    model(_batch()).square().mean().backward()


def _kept_output(model: nn.Module) -> None:
    first = model(_batch())
    model(_batch()).square().mean().backward()
    del first


def _eval(model: nn.Module) -> None:
    model.eval()
    model(_batch()).square().mean().backward()


def _part(model: nn.Module) -> None:
    model(_batch())[:, :3].square().mean().backward()


def _autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(_batch()).square().mean()
    loss.backward()


CHANGED: dict[str, tuple[Step, str]] = {
    "another batch size": (
        lambda model: model(_batch(17)).square().mean().backward(),
        r"another batch size, input 0 is \[17, 64\], planned \[256, 64\]; .* poochplan\.plan_set\(step_for, shapes=",
    ),
    "another loss function": (_another_loss, r"with another loss function or one more term; make a new profile"),
    "a layer replaced": (_replaced, r"layer layers\.1\.\d was replaced, left out or runs another way"),
    "an output kept alive": (_kept_output, r"called again while the output of its call before is held; let go of that"),
    "eval mode": (_eval, r"the model is in eval mode; call model\.train\(\) before the step"),
    "autocast": (_autocast, r"another precision, bfloat16 in place of float32; profile under the same autocast"),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(profiled(fresh(), None), 1, (0, 1, 0))


@pytest.mark.parametrize("what", CHANGED)
def test_the_message_says_what_has_changed_and_what_to_do(plan: Plan, what: str) -> None:
    step, said = CHANGED[what]
    if what == "eval mode":
        model: nn.Module = Dropped()
        plan = random_plan(profiled(model, None), 1, (0, 1, 0))
    else:
        model = fresh()
    with warnings.catch_warnings(record=True) as caught, poochplan.apply(plan, model):
        warnings.simplefilter("always")
        step(model)
    told = [one for one in caught if "diverged from the plan" in str(one.message)]
    assert len(told) == 1, [str(one.message) for one in caught]
    message = str(told[0].message)
    assert re.search(said, message), message
    assert "its gradients are right" in message
    assert not INTERNAL.search(message), message
    assert told[0].filename in (__file__, besides.__file__)  # the step's, or in the model's forward


def test_the_error_says_so_too(plan: Plan) -> None:
    model = fresh()
    with (
        pytest.raises(DivergenceError, match="another batch size"),
        poochplan.apply(plan, model, on_divergence="error"),
    ):
        model(_batch(17)).square().mean().backward()
