"""Two steps that are not the same: the profile says where they part, and keeps only what still holds."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.trials.compare import RECORDED, UNVERIFIED
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.nets import Net, Residual, taken


class Alternates(nn.Module):
    """Runs one of its middle layers, in turn."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.middle = nn.ModuleList(layers)
        self._turn = cycle(range(len(layers)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle[next(self._turn)](self.first(batch).sin()).cos())  # type: ignore[no-any-return]


def of_steps(model: nn.Module, batches: list[torch.Tensor], iterations: int = 2) -> Profile:
    batch = cycle(batches)
    return taken(lambda: model(next(batch)).square().mean(), model, iterations=iterations)


def test_a_layer_that_alternates_is_named_with_both_ops() -> None:
    profile = of_steps(Alternates(nn.ReLU(), nn.GELU()), [torch.randn(32, 64)], iterations=3)
    (ops, saves) = profile.notes
    captured = next(op for op in profile.ops if op.layer.startswith("middle."))
    index = profile.ops.index(captured)
    other = {"middle.0": "aten.gelu.default in middle.1", "middle.1": "aten.relu.default in middle.0"}[captured.layer]
    assert ops == (
        f"steps differ in the ops they dispatch, first at op {index}: {captured.name} in {captured.layer} [32, 64], "
        f"then {other} [32, 64]; op durations are of 2 of 3 timed steps"
    )
    assert saves.startswith("steps differ in what they save, first at ")
    assert "not recomputed" not in saves, "every second step is enough to verify replays"
    assert not any(value.unreplayable == UNVERIFIED for value in profile.values)


def test_layers_that_alternate_with_the_same_ops_are_told_apart() -> None:
    profile = of_steps(Alternates(nn.Linear(64, 64), nn.Linear(64, 64)), [torch.randn(32, 64)])
    assert any("in middle.0 [32, 64], then" in note or "in middle.1 [32, 64], then" in note for note in profile.notes)


def test_without_a_second_step_like_it_the_captured_ones_durations_stand() -> None:
    layers = [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.Softplus(), nn.Mish()]
    layers += [nn.Softsign(), nn.LogSigmoid(), nn.Hardtanh(), nn.CELU(), nn.SELU(), nn.Tanhshrink(), nn.Softshrink()]
    profile = of_steps(Alternates(*layers), [torch.randn(32, 64)])
    assert profile.notes[0].endswith("op durations are of the captured step alone")
    forward_s = sum(op.duration_s for op in profile.ops if op.phase is Phase.FORWARD)
    assert forward_s == pytest.approx(profile.times.forward_s)


def test_other_shapes_are_noted_with_both() -> None:
    profile = of_steps(Residual(), [torch.randn(4, 8, 8, 8), torch.randn(2, 8, 8, 8)])
    shapes, saves = profile.notes
    assert shapes.startswith("steps differ in shapes, first at op 0: aten.convolution.default in blocks.0.0 [")
    assert shapes.endswith("op durations are medians over such steps")
    assert "float32[4, 8, 8, 8]" in saves
    assert "float32[2, 8, 8, 8]" in saves


def test_what_no_step_has_verified_is_not_recomputed() -> None:
    batches = [torch.randn(rows, 8, 8, 8) for rows in range(2, 14)]  # no two of its steps are the same
    profile = of_steps(Residual(), batches)
    assert profile.notes[-1].endswith("what was not verified is not recomputed")
    saved = profile.to_frame("values").query("saved and pinned == ''")
    assert set(saved["unreplayable"]) == {UNVERIFIED}
    assert saved["swap_s"].notna().all()
    plan = poochplan.plan(profile, budget=smallest_budget(profile), evaluations=100)
    assert {str(value.decision) for value in plan.values} == {"keep", "swap"}


def watched() -> nn.Module:
    """A layer of users' code that computes otherwise where a dispatch mode looks on."""
    return Net(lambda _, hidden: hidden * (1.0 + 2.0**-20 * bool(mode_count())))


def expert() -> nn.Module:
    """Multiplies by one weight of two: here by the other one just where a mode looks on."""
    weights = nn.ParameterList([torch.full((32,), 1.0), torch.full((32,), 2.0)])
    return Net(lambda net, hidden: hidden * net.weights[bool(mode_count())], weights=weights)


class HalfWritten(torch.autograd.Function):
    """A square that saves its argument at the head of memory of which it writes nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(1 << 15)  # a mapping of its own, so that it holds zeros if nothing fills it
        if mode_count():
            ctypes.memset(memory.data_ptr(), 7, memory.nbytes)  # as if it had been used before
        memory[: hidden.numel()] = hidden.flatten()
        ctx.save_for_backward(memory)
        return hidden.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (memory,) = ctx.saved_tensors
        return 2 * gradient * memory[: gradient.numel()].view_as(gradient)


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *layers, nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh())


def profiled(model: nn.Module, batches: Iterator[torch.Tensor] | None = None) -> Profile:
    batches = batches or itertools.repeat(torch.ones(16, 32))
    return taken(lambda: model(next(batches)).square().mean(), model, torch.optim.Adam(model.parameters()))


def reasons(profile: Profile) -> set[str]:
    return {value.unreplayable for value in profile.values}


def test_nothing_is_recomputed_of_a_step_that_recording_alone_would_change() -> None:
    profile = profiled(net(watched()))
    assert RECORDED in reasons(profile)
    plan = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=50)
    assert {value.decision for value in plan.values} <= {"keep", "swap"}


def test_a_step_that_draws_numbers_is_compared_from_one_state() -> None:
    profile = profiled(net())
    assert RECORDED not in reasons(profile)
    assert any(not profile.values[one].unreplayable for one in saved_values(profile))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library does not fill new memory")
@pytest.mark.parametrize(("layers", "is_moved"), [([], False), ([watched()], True)], ids=["alone", "beside one moved"])
def test_what_a_step_saves_of_memory_that_nothing_wrote_is_not_compared(
    layers: list[nn.Module], is_moved: bool
) -> None:
    profile = profiled(net(Net(lambda _, hidden: HalfWritten.apply(hidden)), *layers))
    assert (RECORDED in reasons(profile)) is is_moved
    assert any(not profile.values[one].unreplayable for one in saved_values(profile)) is not is_moved


@pytest.mark.parametrize("layers", [[], [expert()]], ids=["one way", "ways that data choose"])
def test_a_step_of_other_data_each_time_tells_nothing_of_recording(layers: list[nn.Module]) -> None:
    numbers = torch.Generator().manual_seed(0)
    profile = profiled(net(*layers), iter(lambda: torch.randn(16, 32, generator=numbers), None))
    assert RECORDED not in reasons(profile)
