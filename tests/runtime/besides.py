"""A step with things that live beside it, one that leaves a tensor in a reference cycle, which only Python's collector
frees, and training loops as people write them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import Memory
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.run_report import Report
from tests.runtime.nets import our_warnings, taken

WIDTH, BATCH = 64, 256


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer | None, also: Sequence[Any] = ()) -> Profile:
    batch = torch.zeros(BATCH, WIDTH)
    return taken(lambda: model(batch).square().mean(), model, optimizer, also=also)


def tight(profile: Profile) -> Plan:
    """A plan at the smallest budget there is: nothing may live beside its step that the profile does not know of."""
    return poochplan.plan(profile, smallest_budget(profile, arena="off"), evaluations=100, arena="off")


def live(plan: Plan) -> Plan:
    """The plan as it would be without the compiled allocator: it promises live bytes alone, at its smallest budget."""
    found = plan.prediction
    first_bytes = found.first_step_peak_bytes + found.live_peak_bytes - found.peak_bytes
    promised = msgspec.structs.replace(
        found, memory=Memory.LIVE, peak_bytes=found.live_peak_bytes, first_step_peak_bytes=first_bytes
    )
    budget_bytes = max(found.live_peak_bytes, first_bytes)
    return msgspec.structs.replace(plan, prediction=promised, budget_bytes=budget_bytes)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()


Loop = Callable[[nn.Module], None]


def under(plan: Plan, model: nn.Module, loop: Loop, **options: Any) -> tuple[Report, list[str]]:
    """The loop in a session: its report, and the warnings of this package."""
    with our_warnings() as told, poochplan.apply(plan, model, **options) as session:
        loop(model)
    return session.report(), told


HELD_BYTES = 256 * 128 * 4
"""Of the tensor that each step leaves."""


class State:
    """Refers to itself through a closure."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.own = lambda: self


class Cyclic(nn.Module):
    """Linear, ReLU, linear. ``keep`` is called with the state around what the ReLU gives, in each step."""

    def __init__(self, keep: Callable[[Cyclic, State], object] = lambda model, state: None) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)
        self.state: State | None = None
        self._keep = keep

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(batch))
        self._keep(self, State(hidden))
        return self.second(hidden).sin()  # type: ignore[no-any-return]


def nowhere(model: Cyclic, state: State) -> None:
    """Garbage as soon as forward returns."""


def in_an_attribute(model: Cyclic, state: State) -> None:
    """The next step lets go of it."""
    model.state = state


def with_step(model: Cyclic) -> tuple[Cyclic, Callable[[], torch.Tensor], torch.optim.Optimizer]:
    """The model, its step and an optimizer that has no state."""
    batch = torch.randn(256, 64)
    return model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Nothing is collected within the block; what is left there is collected behind it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
