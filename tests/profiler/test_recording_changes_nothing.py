"""What a step saves where a mode records it is compared with what it saves where none does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.profiler.trials.compare import RECORDED
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.nets import LINK


class Watched(nn.Module):
    """A layer of users' code that computes otherwise where a dispatch mode looks on."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1.0 + 2.0**-20 * bool(mode_count()))


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *layers, nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh())


def profiled(model: nn.Module, batches: Iterator[torch.Tensor] | None = None) -> Profile:
    batch = torch.ones(16, 32)
    return poochplan.profile(
        lambda: model(next(batches) if batches is not None else batch).square().mean(),
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        iterations=1,
        link=LINK,
    )


def reasons(profile: Profile) -> set[str]:
    return {value.unreplayable for value in profile.values}


def test_nothing_is_recomputed_of_a_step_that_recording_alone_would_change() -> None:
    profile = profiled(net(Watched()))
    assert RECORDED in reasons(profile)
    plan = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=50)
    assert {value.decision for value in plan.values} <= {"keep", "swap"}


def test_a_step_that_draws_numbers_is_compared_from_one_state() -> None:
    profile = profiled(net())
    assert RECORDED not in reasons(profile)
    assert any(not profile.values[one].unreplayable for one in saved_values(profile))


def test_a_step_of_other_data_each_time_tells_nothing_of_recording() -> None:
    numbers = torch.Generator().manual_seed(0)
    profile = profiled(net(), iter(lambda: torch.randn(16, 32, generator=numbers), None))
    assert RECORDED not in reasons(profile)
