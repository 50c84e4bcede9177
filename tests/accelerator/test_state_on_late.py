"""State on an accelerator that torch does not know of stays there, because torch gives it no memory of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan, StateChunk
from poochplan.runtime.session import Session
from poochplan.tensors.optimizers import is_away
from tests.accelerator.test_on_late import LINK
from tests.runtime.nets import our_warnings

WHERE = "late:0"
SIDE, LAYERS = 128, 5
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-2, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
}


class Loop:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS))).to(WHERE)
        self.rows = torch.randn(4, SIDE).to(WHERE)
        self.optimizer = KINDS[kind](self.model.parameters())
        self.seen: list[torch.Tensor] = []

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self.rows)
        return found.square().mean()

    @property
    def state(self) -> list[torch.Tensor]:
        return [one for state in self.optimizer.state.values() for one in state.values() if one.ndim]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.seen += [one.clone() if one.device.type == "cpu" else one.cpu() for one in self.state]
        self.seen += [one.detach().cpu() for one in self.model.parameters()]

    def away(self, session: Session) -> list[torch.Tensor]:
        return [one for one in self.state if is_away(one)]


def planned() -> Plan:
    loop = Loop("SGD")
    profile = poochplan.profile(loop.loss, model=loop.model, optimizer=loop.optimizer, iterations=1, link=LINK)
    state = tuple(
        StateChunk(optimizer=0, first=first, count=2, size_bytes=1 << 16, streamed=first != 2)
        for first in range(0, 2 * LAYERS, 2)
    )
    plan = poochplan.plan(profile, "100%", time_limit_s=1)
    return msgspec.structs.replace(plan, state=state, budget_bytes=1 << 40)


def trained(kind: str, plan: Plan | None = None) -> tuple[list[torch.Tensor], int]:
    loop, count = Loop(kind), 0
    loop.step()
    session: Any = contextlib.nullcontext()
    if plan is not None:
        session = poochplan.apply(plan, loop.model, loop.optimizer, quiet=True)
    with session:
        for _ in range(3):
            loop.step()
            count = len(loop.away(session)) if plan is not None else 0
    assert {one.device.type for one in loop.state} == {"late"}
    loop.step()
    return loop.seen, count


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_plain_steps(kind: str) -> None:
    with our_warnings() as said:
        seen, count = trained(kind, planned())
    assert (said, count) == ([], 0)
    assert all(torch.equal(a, b) for a, b in zip(trained(kind)[0], seen, strict=True))
