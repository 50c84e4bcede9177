"""Two steps that are not the same: the profile says where they part, and keeps only what still holds."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.trials.compare import UNVERIFIED
from tests.runtime.nets import LINK, Residual


class Alternates(nn.Module):
    """Runs one of its middle layers, in turn."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.middle = nn.ModuleList(layers)
        self._turn = cycle(range(len(layers)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle[next(self._turn)](self.first(batch).sin()).cos())  # type: ignore[no-any-return]


def taken(model: nn.Module, batches: list[torch.Tensor], iterations: int = 2) -> Profile:
    batch = cycle(batches)
    return poochplan.profile(lambda: model(next(batch)).square().mean(), model=model, iterations=iterations, link=LINK)


def test_equal_steps_have_no_note_and_are_verified() -> None:
    profile = taken(Residual(), [torch.randn(4, 8, 8, 8)])
    assert profile.notes == ()


def test_a_layer_that_alternates_is_named_with_both_ops() -> None:
    profile = taken(Alternates(nn.ReLU(), nn.GELU()), [torch.randn(32, 64)])
    (ops, saves) = profile.notes
    captured = next(op for op in profile.ops if op.layer.startswith("middle."))
    index = profile.ops.index(captured)
    other = {"middle.0": "aten.gelu.default in middle.1", "middle.1": "aten.relu.default in middle.0"}[captured.layer]
    assert ops == (
        f"steps differ in the ops they dispatch, first at op {index}: {captured.name} in {captured.layer} [32, 64], "
        f"then {other} [32, 64]; op durations are of 1 of 2 timed steps"
    )
    assert saves.startswith("steps differ in what they save, first at ")


def test_every_second_step_is_enough_to_verify_replays() -> None:
    profile = taken(Alternates(nn.ReLU(), nn.GELU()), [torch.randn(32, 64)])
    assert [value.name for value in profile.values if value.unreplayable == UNVERIFIED] == []
    assert not any("not recomputed" in note for note in profile.notes)


def test_layers_that_alternate_with_the_same_ops_are_told_apart() -> None:
    profile = taken(Alternates(nn.Linear(64, 64), nn.Linear(64, 64)), [torch.randn(32, 64)])
    assert any("in middle.0 [32, 64], then" in note or "in middle.1 [32, 64], then" in note for note in profile.notes)


def test_without_a_second_step_like_it_the_captured_ones_durations_stand() -> None:
    layers = [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.Softplus(), nn.Mish()]
    layers += [nn.Softsign(), nn.LogSigmoid(), nn.Hardtanh(), nn.CELU(), nn.SELU(), nn.Tanhshrink(), nn.Softshrink()]
    profile = taken(Alternates(*layers), [torch.randn(32, 64)])
    assert profile.notes[0].endswith("op durations are of the captured step alone")
    forward_s = sum(op.duration_s for op in profile.ops if op.phase is Phase.FORWARD)
    assert forward_s == pytest.approx(profile.times.forward_s)


def test_other_shapes_are_noted_with_both() -> None:
    profile = taken(Residual(), [torch.randn(4, 8, 8, 8), torch.randn(2, 8, 8, 8)])
    shapes, saves = profile.notes
    assert shapes.startswith("steps differ in shapes, first at op 0: aten.convolution.default in blocks.0.0 [")
    assert shapes.endswith("op durations are medians over such steps")
    assert "float32[4, 8, 8, 8]" in saves
    assert "float32[2, 8, 8, 8]" in saves


def test_what_no_step_has_verified_is_not_recomputed() -> None:
    batches = [torch.randn(rows, 8, 8, 8) for rows in range(2, 14)]  # no two of its steps are the same
    profile = taken(Residual(), batches)
    assert profile.notes[-1].endswith("what was not verified is not recomputed")
    saved = profile.to_frame("values").query("saved and pinned == ''")
    assert set(saved["unreplayable"]) == {UNVERIFIED}
    assert saved["swap_s"].notna().all()
    plan = poochplan.plan(profile, budget=smallest_budget(profile), evaluations=100)
    assert {str(value.decision) for value in plan.values} == {"keep", "swap"}
