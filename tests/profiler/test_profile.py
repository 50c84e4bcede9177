"""A profile tells what the step does, exactly, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.occupancy import live_bytes
from poochplan.formats.profile import Kind, Phase, PointKind, Profile
from poochplan.profiler.link import measure_link
from tests.planner.random_profiles import with_facts
from tests.runtime.nets import Net, taken


def network(between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> nn.Module:
    """Linear, ReLU, linear: a step small enough to be checked by hand."""
    layers = {"first": nn.Linear(64, 128, bias=False), "second": nn.Linear(128, 64, bias=False)}
    return Net(lambda net, batch: net.second(between(net.first(batch))), **layers)


@pytest.fixture(scope="module")
def chain() -> Profile:
    torch.manual_seed(0)
    model, batch = network(), torch.randn(32, 64)
    return taken(lambda: model(batch).sum(), model)


def test_the_values_of_a_small_step_are_those_worked_out_by_hand(chain: Profile) -> None:
    saved = [chain.values[chain.handles[p.handle].value] for p in chain.points if p.kind is PointKind.SAVE]
    assert [(v.kind, v.size_bytes, v.shape) for v in saved] == [
        (Kind.INPUT, 32 * 64 * 4, (32, 64)),
        (Kind.ACTIVATION, 32 * 128 * 4, (32, 128)),
    ]
    assert saved[1].name == "step/relu"
    assert saved[1].pinned == saved[1].unreplayable == ""
    assert chain.device.kind == "cpu", "by default where the model is"
    assert saved[0].pinned == "input of the step: held by the caller, or made outside torch or by a compiled function"


def test_a_value_dies_for_forward_when_the_next_layer_has_read_it(chain: Profile) -> None:
    mm = [i for i, op in enumerate(chain.ops) if op.name == "aten.mm.default" and op.phase is Phase.FORWARD]
    relu = next(v for v in chain.values if v.name == "step/relu")
    assert chain.ops[relu.born].name == "aten.relu.default"
    assert chain.op_ticks[mm[1]] <= relu.forward_death < chain.op_ticks[mm[1] + 1]
    use = next(t for p, t in zip(chain.points, chain.point_ticks, strict=True) if p.kind is PointKind.USE)
    assert relu.freed > use


def test_layers_are_module_paths_also_in_backward(chain: Profile) -> None:
    products = [(op.phase, op.layer) for op in chain.ops if op.name == "aten.mm.default"]
    assert products[:2] == [(Phase.FORWARD, "first"), (Phase.FORWARD, "second")]
    assert {layer for phase, layer in products if phase is Phase.BACKWARD} == {"first", "second"}


def test_an_opaque_writer_makes_a_value_unreplayable() -> None:
    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(batch)
            out.numpy()[:] = batch.detach().numpy() * 2  # written past the dispatcher
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 + 0 * ctx.saved_tensors[0]

    model, batch = network(Outside.apply), torch.randn(32, 64)
    profile = taken(lambda: model(batch).sum(), model)
    value = next(v for v in profile.values if v.unreplayable.startswith("aten.empty_like"))
    assert "uninitialised" in value.unreplayable


def test_the_measured_link_carries_both_directions_and_its_throttle(on_disk: Path) -> None:
    link = measure_link(torch.device("cpu"), on_disk, 50e6)  # slow enough that a busy machine keeps up with it
    for direction in (link.outward, link.inward):
        assert 0.5 * 50e6 < direction.bandwidth_bytes_per_s < 1.5 * 50e6
        assert len(direction.curve) >= 3
    assert 0.3 <= link.duplex <= 1
    assert link.throttle_bytes_per_s == 50e6
    assert list(on_disk.iterdir()) == []


def test_the_generator_is_afterwards_as_it_was_also_when_the_link_is_measured(on_disk: Path) -> None:
    model, batch = network(), torch.randn(32, 64)
    state = torch.get_rng_state()
    poochplan.profile(lambda: model(batch).sum(), model=model, iterations=1, spill_dir=on_disk, throttle="400MB/s")
    assert torch.equal(state, torch.get_rng_state())


def test_what_an_op_takes_beside_its_outputs_is_part_of_the_peak(chain: Profile) -> None:
    last = len(chain.ops) - 1
    curve, raised = live_bytes(chain), live_bytes(with_facts(chain, "ops", last, workspace_bytes=1 << 30))
    assert raised[chain.op_ticks[last]] - curve[chain.op_ticks[last]] == 1 << 30
    assert int((raised != curve).sum()) == 1
    assert chain.in_core_peak_bytes == curve.max()


def test_a_gradient_that_the_loss_of_the_step_before_holds_is_live_through_forward() -> None:
    """wav2vec2 makes a leaf of its input; the gradient of such a leaf lives as long as the graph does."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        return net.inner(batch.view(-1, 256).requires_grad_()).sin()  # type: ignore[no-any-return]

    model, batch = Net(body, inner=nn.Linear(256, 256)), torch.randn(64, 256)
    profile = taken(lambda: model(batch).square().mean(), model)
    held = [value for value in profile.values if value.kind is Kind.INPUT and value.size_bytes == 64 * 256 * 4]
    assert len(held) == 2  # the input, and the gradient from the step before
    assert min(value.freed for value in held) < profile.tick_count - 1


def test_what_is_made_before_the_model_is_called_is_not_recomputed() -> None:
    """A session records from the call on. The same op within the model is run again."""

    model = Net(lambda net, batch: net.inner(net.inner(batch).cos().mul(2)), inner=nn.Linear(64, 64))
    data = torch.randn(64, 64)
    profile = taken(lambda: model(data.mul(2)).mean(), model)
    reasons = {value.name: value.unreplayable for value in profile.values}
    assert reasons["step/mul"] == "aten.mul.Tensor runs before the model is called"
    assert reasons["step/mul#2"] == ""
