"""Sparse and nested tensors: their bytes are in the profile, they are always kept, and training stays bitwise equal."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from poochplan.errors import StepError
from poochplan.formats.profile import Kind, Profile
from tests.runtime.nets import Case, Net, followed, of
from tests.runtime.random_plans import random_plan

Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _embedding(*layers: nn.Module) -> Made:
    model, tokens = nn.Sequential(nn.Embedding(500, 16, sparse=True), *layers), torch.randint(500, (32,))
    return model, lambda model: model(tokens).square().mean()


def _graph(layout: torch.layout) -> Made:
    """Two layers over the edges of a graph."""
    edges, nodes = (torch.rand(24, 24) > 0.7).float().to_sparse(layout=layout), torch.randn(24, 16)

    def body(net: Net) -> torch.Tensor:
        found: torch.Tensor = net.second(torch.sparse.mm(edges, net.first(torch.sparse.mm(edges, nodes)).tanh()))
        return found

    return Net(body, first=nn.Linear(16, 32), second=nn.Linear(32, 4)), lambda model: model().square().mean()


def _sparse_weight() -> nn.Module:
    weight = nn.Parameter((torch.rand(16, 16) * (torch.rand(16, 16) > 0.7)).to_sparse())
    body = lambda net, batch: net.linear(torch.sparse.mm(net.weight, batch.t()).t().tanh())  # noqa: E731
    return Net(body, weight=weight, linear=nn.Linear(16, 4))


def _nested(layout: torch.layout) -> Made:
    parts = [torch.randn(5, 16), torch.randn(9, 16)]

    def loss_of(model: nn.Module) -> torch.Tensor:
        output = model(torch.nested.nested_tensor(parts, layout=layout))
        return torch.cat([part.flatten() for part in output.unbind()]).square().mean()

    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), loss_of


CASES = {
    "embedding": Case(lambda: _embedding(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), SGD),
    "SparseAdam": Case(lambda: _embedding(nn.Tanh()), torch.optim.SparseAdam),
    "COO input": Case(lambda: _graph(torch.sparse_coo), SGD),
    "CSR input": Case(lambda: _graph(torch.sparse_csr), SGD),
    "sparse weight": of(_sparse_weight, 8, 16, optimizer=SGD),
    "strided nested": Case(lambda: _nested(torch.strided), SGD),
    "jagged nested": Case(lambda: _nested(torch.jagged), SGD),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: beta, prototype


def fake(name: str) -> Profile:
    return CASES[name].profile("fake", "v100")


@pytest.mark.parametrize("mode", ["run", "swap-all", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_with_them_is_profiled_and_trains_bitwise_equally_under_a_plan(name: str, mode: str) -> None:
    followed(CASES[name], random_plan(CASES[name].profile(mode), 0, (1, 1, 2)))


def test_a_sparse_gradient_s_bytes_are_gradients() -> None:
    profile = CASES["embedding"].profile()
    gradients = [value for value in profile.values if value.kind is Kind.GRADIENT and value.shape == (32, 16)]
    assert [value.size_bytes for value in gradients] == [32 * 16 * 4]


@pytest.mark.parametrize(
    ("name", "first"),
    [("COO input", "sparse_coo in "), ("strided nested", "nested in 0"), ("jagged nested", "nested in 0")],
)
def test_saved_ones_are_noted_with_their_bytes(name: str, first: str) -> None:
    (note,) = CASES[name].profile().notes
    assert note.startswith("saved tensors that are sparse, nested or of a subclass are always kept: ")
    assert f"first {first}" in note


def test_a_nested_activation_is_part_of_the_peak() -> None:
    rows, profile = 5 + 9, CASES["jagged nested"].profile()
    assert [value.shape for value in profile.values if value.name == "1/gelu"] == [(rows, 32)]


@pytest.mark.parametrize("name", ["embedding", "SparseAdam", "sparse weight"])
def test_mode_fake_says_that_sparse_figures_are_estimates(name: str) -> None:
    said = "sparse tensors may have no elements without data, first in "
    assert any(note.startswith(said) for note in fake(name).notes)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("COO input", "found a sparse_coo one in aten."),
        ("CSR input", "found a sparse_csr one in aten."),
        ("strided nested", "which has no shape function"),
    ],
)
def test_mode_fake_refuses_the_inputs_that_it_cannot_stand_for(name: str, found: str) -> None:
    with pytest.raises(StepError) as error:
        fake(name)
    assert found in str(error.value)
    assert "profile in mode run" in str(error.value)


def test_mode_fake_sees_jagged_tensors_as_they_are() -> None:
    assert fake("jagged nested").in_core_peak_bytes == CASES["jagged nested"].profile().in_core_live_peak_bytes
