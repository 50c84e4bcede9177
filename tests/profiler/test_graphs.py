"""A compiled step is profiled without memory node by node, and nothing of model or compiler is changed by that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import PointKind, Profile, Value
from poochplan.formats.queries import saved_values
from poochplan.profiler.graph_capture import ELSEWHERE, SEVERAL
from tests.compiling.small_nets import fresh
from tests.runtime.nets import TORCH, Net
from tests.runtime.served import needs_compiler

pytestmark = [needs_compiler, pytest.mark.cpu_device]


@pytest.fixture(scope="module", autouse=True)
def _clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def graphs_of(model: nn.Module, step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer | None) -> Profile:
    return poochplan.profile(step, model=model, optimizer=optimizer, mode="fake", roofline="5e10,1e10")


def saved(profile: Profile) -> list[Value]:
    return [profile.values[number] for number in dict.fromkeys(saved_values(profile))]


@pytest.fixture(scope="module")
def graphs() -> Profile:
    model, step, optimizer = fresh()
    model.compile(dynamic=False)
    return graphs_of(model, step, optimizer)


def test_each_value_that_a_graph_saves_names_its_node_and_its_layer(graphs: Profile) -> None:
    named = [value for value in saved(graphs) if value.nodes]
    assert {len(value.nodes) for value in named} == {1}
    keys = {value.nodes[0].split("/")[0] for value in named}
    assert len(keys) == 3  # with graph breaks between them
    assert {"first", "norm", "up", "down", "drop"} >= {value.layer for value in named if value.layer} >= {"first", "up"}
    assert sum(value.unreplayable == "" for value in named) >= 4
    assert sum(value.size_bytes for value in named) > 0.6 * sum(value.size_bytes for value in saved(graphs))


def test_saves_lie_in_forward_and_uses_in_backward_each_at_a_point_of_its_own(graphs: Profile) -> None:
    kinds = [point.kind for point in graphs.points]
    first_use = kinds.index(PointKind.USE)
    assert PointKind.SAVE not in kinds[first_use:]
    assert len(graphs.point_ticks) == len(kinds)
    born = [graphs.values[graphs.handles[point.handle].value] for point in graphs.points[:first_use]]
    assert len({value.forward_death for value in born}) > len(born) // 2  # they leave one after the other


@torch.library.custom_op("poochplan_tests::doubles", mutates_args={"tensor"})
def doubles(tensor: torch.Tensor) -> None:
    tensor.mul_(2.0)


@pytest.mark.skipif(
    TORCH < (2, 13), reason="before torch 2.13 a graph with auto_functionalized_v2 runs on no fake tensors"
)
def test_an_op_of_the_user_s_that_writes_into_its_argument_is_an_op_of_the_graph() -> None:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        hidden = net.first(batch)
        with torch.no_grad():
            scale = hidden.sigmoid()
            doubles(scale)
        return net.last((hidden * scale).tanh())  # type: ignore[no-any-return]

    model, batch = Net(body, first=nn.Linear(64, 64), last=nn.Linear(64, 64)), torch.randn(256, 64)
    model.compile(dynamic=False)
    profile = graphs_of(model, lambda: model(batch).square().mean(), None)
    assert any("auto_functionalized" in op.name for op in profile.ops)
    assert sum(bool(value.nodes) for value in saved(profile)) > 1


def test_a_step_with_nothing_compiled_names_no_nodes() -> None:
    model, step, optimizer = fresh()
    assert not any(value.nodes for value in graphs_of(model, step, optimizer).values)


def test_what_is_saved_outside_of_graphs_or_by_a_graph_that_runs_twice_is_never_recomputed() -> None:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        batch = net.before(batch).tanh()  # saved here, and by the block's graph
        return net.block(net.block(batch)).sum()  # type: ignore[no-any-return]

    block = Net(lambda net, batch: net.inner(batch).sin().exp(), inner=nn.Linear(64, 64))
    model, batch = Net(body, before=nn.Linear(64, 64), block=block), torch.randn(64, 64)
    model.block.compile(dynamic=False)
    found = saved(graphs_of(model, lambda: model(batch), None))
    inside = [value for value in found if value.nodes]
    assert inside
    assert {value.unreplayable for value in inside} == {SEVERAL}
    assert {value.unreplayable for value in found if not value.nodes} == {ELSEWHERE}


def test_what_is_made_of_a_buffer_that_the_step_writes_is_never_recomputed() -> None:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        scaled = net.inner(batch) + net.scale
        net.scale.mul_(1.5)
        return (scaled.sin() @ net.inner.weight).exp().sum()  # type: ignore[no-any-return]

    model, batch = Net(body, inner=nn.Linear(64, 64), scale=nn.Buffer(torch.ones(64))), torch.randn(64, 64)
    model.compile(dynamic=False)
    reasons = {value.unreplayable for value in saved(graphs_of(model, lambda: model(batch), None)) if value.nodes}
    assert any("an input that the step writes" in reason for reason in reasons)
