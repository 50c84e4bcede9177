"""Profiles beside what Inductor makes: of compiled steps, node by node, and of compiled functions in a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import poochplan
from poochplan.torch_private.compiler_internals import inductor_settings
from tests.compiling.small_nets import fresh, train
from tests.profiler.test_graphs import graphs_of
from tests.runtime.nets import Net, equal, of, taken
from tests.runtime.served import needs_compiler, needs_inductor

pytestmark = [needs_compiler, needs_inductor, pytest.mark.cpu_device]


@pytest.fixture(scope="module", autouse=True)
def _clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_its_in_core_peak_is_that_of_the_measured_step() -> None:
    model, step, optimizer = fresh()
    model.compile(dynamic=False)
    graphs = graphs_of(model, step, optimizer)
    model, step, optimizer = fresh()
    model.compile(dynamic=False)
    measured = taken(step, model, optimizer)
    assert abs(graphs.in_core_peak_bytes / measured.in_core_peak_bytes - 1) < 0.1
    assert graphs.static_bytes == measured.static_bytes
    assert graphs.model == measured.model


def test_model_compiler_and_what_is_compiled_are_as_before() -> None:
    model, step, optimizer = fresh()
    model.compile(dynamic=False)
    reference = train(model, step, optimizer, 2)
    model, step, optimizer = fresh()
    model.compile(dynamic=False)
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    settings = inductor_settings().custom_partitioner_fn, inductor_settings().fx_graph_cache
    graphs_of(model, step, optimizer)
    after = (*model.parameters(), *model.buffers(), torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (inductor_settings().custom_partitioner_fn, inductor_settings().fx_graph_cache) == settings
    assert not optimizer.state
    assert equal(train(model, step, optimizer, 2), reference)


def test_a_compiled_function_that_has_run_is_profiled_without_memory_as_it_is_written() -> None:
    """Its kernels would read the memory that fake tensors do not have, which ends the process."""
    activation = torch.compile(lambda hidden: hidden.tanh() * hidden.exp())
    case = of(lambda: Net(lambda net, batch: activation(net.first(batch)), first=nn.Linear(8, 8)), 4, 8)
    model, step, _ = case.fresh()
    step().backward()
    profile = poochplan.profile(step, model=model, mode="fake", roofline="v100")
    assert {"aten.tanh.default", "aten.exp.default"} <= {op.name for op in profile.ops}
    assert case.new_profile(mode="auto").mode == "run"
