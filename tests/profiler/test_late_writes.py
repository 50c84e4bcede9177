"""What a step writes past the dispatcher after it was saved is found by verification, and no plan copies it before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.sources import sources_of
from poochplan.profiler.trials.compare import SOURCE_WRITTEN_LATE, WRITTEN_LATE
from tests.runtime.nets import Case, Net, followed

Write = Callable[[torch.Tensor], None]


def none(tensor: torch.Tensor) -> None:
    """Leaves it as it is."""


def zero(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int16).numpy()[:] = 0


def turn(tensor: torch.Tensor) -> None:
    """Moves elements; their sum stays."""
    array = tensor.detach().view(torch.int16).numpy()
    array[:] = array[::-1].copy()


def writing(to: str, write: Write) -> Case:
    """A step that saves the float32 copy of a tensor of bfloat16, and writes one of them before or after that."""

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

    batch = torch.randn(512, 32)
    return Case(lambda: (Net(body, first=nn.Linear(32, 64), last=nn.Linear(64, 1)), lambda model: model(batch)))


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize("write", [zero, turn])
@pytest.mark.parametrize("to", ["source before the save", "source", "value"])
def test_a_late_write_is_found_and_no_plan_gives_other_gradients(to: str, write: Write, mode: str) -> None:
    case = writing(to, write)
    profile = case.profile(mode)
    marked = {value.pinned: value.dtype for value in profile.values if "no operator declares" in value.pinned}
    assert marked == ({WRITTEN_LATE: "float32"} if to == "value" else {SOURCE_WRITTEN_LATE: "bfloat16"})
    assert any("no operator declares" in note for note in profile.notes)
    assert bool(sources_of(profile)) == (to == "value")
    followed(case, poochplan.plan(profile, budget=smallest_budget(profile), time_limit_s=1), 1)


@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_step_without_late_writes_has_its_source(mode: str) -> None:
    profile = writing("source", none).profile(mode)
    assert [profile.values[one].dtype for one in sources_of(profile).values()] == ["bfloat16"]
    assert not any("no operator declares" in note for note in profile.notes)
