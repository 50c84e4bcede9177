"""Under autocast to 16 bits a plan inside compiled code keeps the bits of stock Inductor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from poochplan.formats.plan import Decision
from tests.compiling.small_nets import SLOW_LINK, Made, followed, stock
from tests.runtime.nets import LINK
from tests.runtime.served import needs_inductor

TOO_MUCH = pytest.mark.filterwarnings("error:poochplan. a step that follows the plan took:RuntimeWarning")
"""A step above its budget fails."""
pytestmark = [needs_inductor, pytest.mark.cpu_device, TOO_MUCH]


class Mixed(nn.Module):
    """Products in 16 bits, and sums in 32 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 256), nn.Linear(256, 128)
        self.norm, self.last = nn.LayerNorm(128), nn.Linear(128, 64, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.middle(self.first(batch))).tanh())  # type: ignore[no-any-return]


def fresh() -> Made:
    torch.manual_seed(0)
    model, batch = Mixed(), torch.randn(1024, 64)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()  # type: ignore[no-any-return]

    return model, step, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def in_core() -> Iterator[list[list[torch.Tensor]]]:
    torch._dynamo.reset()
    yield stock(2, fresh)  # whose model is let go of
    torch._dynamo.reset()


@pytest.mark.deep
def test_what_is_swapped_under_autocast_gives_the_same_bits(in_core: list[list[torch.Tensor]]) -> None:
    plan = followed(fresh, in_core, "85%", LINK).plan
    assert Decision.SWAP in {value.decision for value in plan.values}


def test_what_is_recomputed_under_autocast_gives_the_same_bits(in_core: list[list[torch.Tensor]]) -> None:
    assert followed(fresh, in_core, "85%", SLOW_LINK).plan.replays
