"""A profile says which of the optimizers' state may leave the device between steps, parameter by parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import InputFileError
from poochplan.formats.profile import Kind, Phase, Profile
from poochplan.formats.profile_parts import OptimizerState
from tests.runtime.besides import plain_step
from tests.runtime.nets import LINK, taken

WIDTH = 128
"""A square weight of this width has moments of the least size that leaves."""
SQUARE_BYTES = WIDTH * WIDTH * 4
MODES: list[dict[str, Any]] = [
    {"mode": "run"},
    {"mode": "swap-all"},
    {"mode": "fake"},
    {"mode": "fake", "roofline": "h100"},
]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str = "run", **options: Any) -> Profile:
    batch = torch.randn(16, WIDTH)
    return taken(lambda: model(batch).square().mean(), model, optimizer, mode, **options)


def counts(optimizer: OptimizerState) -> list[int]:
    """How many tensors of each parameter's state may leave."""
    return [len(numbers) for numbers in optimizer.parameters]


def uses(profile: Profile, number: int) -> list[str]:
    """The ops that read or write a value."""
    return [op.name for op in profile.ops if number in {*op.inputs, *op.writes}]


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(options.values()))
def test_each_mode_lists_both_moments_of_each_weight_and_none_of_a_bias(options: dict[str, Any]) -> None:
    model = layers()
    profile = profiled(model, torch.optim.AdamW(model.parameters()), **options)
    (found,) = profile.optimizers
    assert (found.name, found.separable, counts(found)) == ("AdamW", True, [2, 0, 2, 0])
    numbers = [number for one in found.parameters for number in one]
    assert len(set(numbers)) == 4
    for value in (profile.values[number] for number in numbers):
        assert (value.kind, value.size_bytes, value.born) == (Kind.OPTIMIZER_STATE, SQUARE_BYTES, -1)


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(options.values()))
def test_state_from_before_the_profile_is_listed_as_well(options: dict[str, Any]) -> None:
    model = layers()
    (found,) = profiled(model, torch.optim.Adagrad(model.parameters()), **options).optimizers
    assert counts(found) == [1, 0, 1, 0]


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_op_on_all_parameters_names_the_state_that_it_reads(kind: str, options: dict[str, Any]) -> None:
    model = layers()
    profile = profiled(model, torch.optim.AdamW(model.parameters(), **{kind: True}), **options)
    (found,) = profile.optimizers
    (first, _, second, _) = found.parameters
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert uses(profile, one) == uses(profile, other) != []
    readers = {op.name for op in profile.ops if op.phase is Phase.OPTIMIZER and {*first, *second} & {*op.inputs}}
    assert all(f"_{kind}_" in name for name in readers)


def test_an_op_on_one_parameter_names_the_state_of_that_one() -> None:
    model = layers()
    profile = profiled(model, torch.optim.AdamW(model.parameters()))
    (found,) = profile.optimizers
    (first, _, second, _) = map(set, found.parameters)
    ops = [{*op.inputs} for op in profile.ops if op.phase is Phase.OPTIMIZER]
    assert any(first & one for one in ops)
    assert not any(first & one and second & one for one in ops)


def test_other_classes_are_whole_and_their_state_is_listed() -> None:
    class Own(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = layers()
    (found,) = profiled(model, Own(model.parameters())).optimizers
    assert (found.name, found.separable, counts(found)) == ("Own", False, [2, 0, 2, 0])


def test_an_optimizer_that_a_library_has_wrapped_counts_as_itself() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As accelerate's is."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.state, self.param_groups = optimizer.state, optimizer.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    model = layers()
    (found,) = profiled(model, Wrapper(torch.optim.Adam(model.parameters()))).optimizers
    assert (found.name, found.separable, counts(found)) == ("Adam", True, [2, 0, 2, 0])


def test_an_optimizer_without_state_has_parameters_of_none() -> None:
    model = layers()
    (found,) = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1)).optimizers
    assert (found.name, found.separable, counts(found)) == ("SGD", True, [0, 0, 0, 0])


def test_parameters_come_in_the_order_of_the_groups_and_frozen_ones_have_no_state() -> None:
    model = layers()
    first, second = model[0], model[2]
    first.weight.requires_grad_(False)
    groups = [{"params": [second.bias, second.weight]}, {"params": [first.bias, first.weight], "lr": 0.5}]
    (found,) = profiled(model, torch.optim.Adam(groups)).optimizers
    assert counts(found) == [0, 2, 0, 0]


def test_state_that_something_else_holds_too_is_not_listed() -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    plain_step(model, optimizer, torch.randn(2, WIDTH))
    view = optimizer.state[model[0].weight]["exp_avg"].view(-1)
    (found,) = profiled(model, optimizer).optimizers
    assert counts(found) == [1, 0, 2, 0]
    del view
    (found,) = profiled(model, optimizer).optimizers
    assert counts(found) == [2, 0, 2, 0]


def test_state_of_two_parameters_in_one_tensor_is_listed_once() -> None:
    class Shared(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            weights = [one for group in self.param_groups for one in group["params"] if one.ndim == 2]
            average = torch.zeros_like(weights[0])
            for one in weights:
                self.state[one]["average"] = average

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one, state in self.state.items():
                state["average"].add_(one.grad)
                one.data.sub_(state["average"])

    model = layers()
    (found,) = profiled(model, Shared(model.parameters())).optimizers
    assert (found.separable, counts(found)) == (False, [1, 0, 0, 0])


def test_the_profile_of_a_running_loop_lists_each_optimizer_in_the_order_of_their_steps(tmp_path: Path) -> None:
    model = layers()
    adam = torch.optim.AdamW(model[0].parameters())
    momentum = torch.optim.SGD(model[2].parameters(), lr=0.01, momentum=0.9)
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 0.5, "cache": tmp_path}
    other = nn.Linear(WIDTH, WIDTH)
    elsewhere = torch.optim.AdamW(other.parameters())
    plain_step(other, elsewhere, torch.randn(2, WIDTH))
    with poochplan.auto(model, adam, budget="100%", **options) as session:
        for _ in range(14):
            model(torch.randn(64, WIDTH)).square().mean().backward()
            for one in (adam, momentum):
                one.step()
                one.zero_grad()
        session.wait_until_planned()
        profile = session.profile
    assert profile is not None
    assert [(one.name, one.separable, counts(one)) for one in profile.optimizers] == [
        ("AdamW", True, [2, 0]),
        ("SGD", True, [1, 0]),
    ]
    numbers = [number for one in profile.optimizers for numbers in one.parameters for number in numbers]
    assert {profile.values[number].kind for number in numbers} == {Kind.OPTIMIZER_STATE}


def test_what_may_leave_is_one_row_of_the_table() -> None:
    model = layers()
    rows = profiled(model, torch.optim.AdamW(model.parameters())).rows()
    assert rows["may leave between steps"] == "256 KiB of AdamW's state, in chunks"
    rows = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1)).rows()
    assert "may leave between steps" not in rows


def test_a_file_that_lists_state_which_is_no_value_is_refused(tmp_path: Path) -> None:
    model = layers()
    profile = profiled(model, torch.optim.AdamW(model.parameters()), "fake", roofline="h100")
    wrong = OptimizerState(name="AdamW", parameters=((), (3, 99_999)))
    msgspec.structs.replace(profile, optimizers=(wrong,)).save(tmp_path / "profile.json")
    with pytest.raises(InputFileError, match=r"optimizers\[0\].parameters\[1\]: expected less than \d+"):
        Profile.load(tmp_path / "profile.json")


def test_a_scheduler_which_wraps_the_optimizers_step_changes_nothing() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    (found,) = profiled(model, optimizer).optimizers
    assert counts(found) == [1, 0, 1, 0]
