"""What a step writes past the dispatcher after it was saved is found by verification, and no plan copies it before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Profile
from poochplan.formats.sources import sources_of
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.trials.compare import SOURCE_WRITTEN_LATE, WRITTEN_LATE
from tests.runtime.nets import Net, taken

Write = Callable[[torch.Tensor], None]


def none(tensor: torch.Tensor) -> None:
    """Leaves it as it is."""


def zero(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int16).numpy()[:] = 0


def turn(tensor: torch.Tensor) -> None:
    """Moves elements; their sum stays."""
    array = tensor.detach().view(torch.int16).numpy()
    array[:] = array[::-1].copy()


def profiled(to: str, write: Write, mode: str) -> tuple[Profile, nn.Module, torch.Tensor]:
    """Of a step that saves the float32 copy of a tensor of bfloat16, and writes one of them before or after that."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        source = net.first(batch).bfloat16() * 1.5
        copy = source.float()
        if to == "source before the save":
            write(source)
        squares = copy * copy
        if to in ("source", "value"):
            write(source if to == "source" else copy)
        del source, copy
        return net.last(squares.sin()).sum()  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model, batch = Net(body, first=nn.Linear(32, 64), last=nn.Linear(64, 1)), torch.randn(512, 32)
    return taken(lambda: model(batch), model, mode=mode), model, batch


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize("write", [zero, turn])
@pytest.mark.parametrize("to", ["source before the save", "source", "value"])
def test_a_late_write_is_found_and_no_plan_gives_other_gradients(to: str, write: Write, mode: str) -> None:
    profile, model, batch = profiled(to, write, mode)
    marked = {value.pinned: value.dtype for value in profile.values if "no operator declares" in value.pinned}
    assert marked == ({WRITTEN_LATE: "float32"} if to == "value" else {SOURCE_WRITTEN_LATE: "bfloat16"})
    assert any("no operator declares" in note for note in profile.notes)
    assert bool(sources_of(profile)) == (to == "value")
    plan = poochplan.plan(profile, budget=smallest_budget(profile), time_limit_s=1)
    plain = gradients(model, batch)
    with poochplan.apply(plan, model):
        planned = gradients(model, batch)
    assert all(map(torch.equal, plain, planned))


@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_step_without_late_writes_has_its_source(mode: str) -> None:
    profile, _, _ = profiled("source", none, mode)
    assert [profile.values[one].dtype for one in sources_of(profile).values()] == ["bfloat16"]
    assert not any("no operator declares" in note for note in profile.notes)
