"""Sparse and nested tensors: their bytes are in the profile, they are always kept, and training stays bitwise equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import StepError
from poochplan.formats.profile import Kind, Profile
from tests.runtime.nets import LINK, equal
from tests.runtime.random_plans import random_plan

Made = tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]


def embedding() -> Made:
    model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    tokens = torch.randint(500, (32,))
    return model, lambda: model(tokens).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)


def sparse_adam() -> Made:
    model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Tanh())
    tokens = torch.randint(500, (32,))
    return model, lambda: model(tokens).square().mean(), torch.optim.SparseAdam(model.parameters())


class Graph(nn.Module):
    """Two layers over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, edges: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sparse.mm(edges, self.first(torch.sparse.mm(edges, nodes)).tanh()))  # type: ignore[no-any-return]


def _graph(edges: torch.Tensor) -> Made:
    model, nodes = Graph(), torch.randn(24, 16)
    return model, lambda: model(edges, nodes).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)


def coo_input() -> Made:
    return _graph((torch.rand(24, 24) > 0.7).float().to_sparse())


def csr_input() -> Made:
    return _graph((torch.rand(24, 24) > 0.7).float().to_sparse_csr())


class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(16, 16) * (torch.rand(16, 16) > 0.7)).to_sparse())
        self.linear = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sparse.mm(self.weight, batch.t()).t().tanh())  # type: ignore[no-any-return]


def sparse_weight() -> Made:
    model, batch = SparseWeight(), torch.randn(8, 16)
    return model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)


def _nested(layout: torch.layout) -> Made:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parts = [torch.randn(5, 16), torch.randn(9, 16)]

    def step() -> torch.Tensor:
        output = model(torch.nested.nested_tensor(parts, layout=layout))
        return torch.cat([part.flatten() for part in output.unbind()]).square().mean()

    return model, step, torch.optim.SGD(model.parameters(), lr=0.1)


def strided_nested() -> Made:
    return _nested(torch.strided)


def jagged_nested() -> Made:
    return _nested(torch.jagged)


ALL = [embedding, sparse_adam, coo_input, csr_input, sparse_weight, strided_nested, jagged_nested]


def fresh(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own: beta, prototype
        return make()


def taken(make: Callable[[], Made], mode: str) -> Profile:
    model, step, optimizer = fresh(make)
    own: dict[str, object] = {"roofline": "v100"} if mode == "fake" else {"iterations": 1}
    return poochplan.profile(step, model=model, optimizer=optimizer, mode=mode, link=LINK, **own)  # type: ignore[arg-type]


def trained(make: Callable[[], Made], plan: poochplan.Plan | None = None) -> list[list[torch.Tensor]]:
    model, step, optimizer = fresh(make)
    seen = []

    def go() -> None:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            seen.append([loss.detach().clone(), *(g.to_dense() if g.is_sparse else g.clone() for g in gradients)])
            optimizer.step()

    if plan is None:
        go()
        return seen
    with poochplan.apply(plan, model) as session:
        go()
    assert session.report().total.fallbacks == 0
    return seen


@pytest.mark.parametrize("mode", ["run", "swap-all", "auto"])
@pytest.mark.parametrize("make", ALL)
def test_a_step_with_them_is_profiled_and_trains_bitwise_equally_under_a_plan(
    make: Callable[[], Made], mode: str
) -> None:
    profile = taken(make, mode)
    assert equal(trained(make), trained(make, random_plan(profile, 0, (1, 1, 2))))


def test_a_sparse_gradient_s_bytes_are_gradients() -> None:
    profile = taken(embedding, "run")
    gradients = [value for value in profile.values if value.kind is Kind.GRADIENT and value.shape == (32, 16)]
    assert [value.size_bytes for value in gradients] == [32 * 16 * 4]


@pytest.mark.parametrize("make", [coo_input, strided_nested, jagged_nested])
def test_saved_ones_are_noted_with_their_bytes(make: Callable[[], Made]) -> None:
    (note,) = taken(make, "run").notes
    assert note.startswith("saved tensors that are sparse, nested or of a subclass are always kept: ")
    assert {coo_input: "first sparse_coo in ", strided_nested: "first nested in 0", jagged_nested: "first nested in 0"}[
        make
    ] in note


def test_a_nested_activation_is_part_of_the_peak() -> None:
    rows, profile = 5 + 9, taken(jagged_nested, "run")
    assert [value.shape for value in profile.values if value.name == "1/gelu"] == [(rows, 32)]


@pytest.mark.parametrize("make", [embedding, sparse_adam, sparse_weight])
def test_mode_fake_says_that_sparse_figures_are_estimates(make: Callable[[], Made]) -> None:
    assert any(
        note.startswith("sparse tensors may have no elements without data, first in ")
        for note in taken(make, "fake").notes
    )


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (coo_input, "found a sparse_coo one in aten."),
        (csr_input, "found a sparse_csr one in aten."),
        (strided_nested, "which has no shape function"),
    ],
)
def test_mode_fake_refuses_the_inputs_that_it_cannot_stand_for(make: Callable[[], Made], found: str) -> None:
    with pytest.raises(StepError) as error:
        taken(make, "fake")
    assert found in str(error.value)
    assert "profile in mode run" in str(error.value)


def test_mode_fake_sees_jagged_tensors_as_they_are() -> None:
    fake, real = taken(jagged_nested, "fake"), taken(jagged_nested, "run")
    assert fake.in_core_peak_bytes == real.in_core_live_peak_bytes


@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_a_loss_of_such_a_kind_is_told_so(layout: str) -> None:
    model = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        loss = model(torch.ones(2, 4)).mean()
        return loss.view(1).to_sparse() if layout == "sparse" else torch.nested.as_nested_tensor([loss.view(1)])

    with pytest.raises(StepError, match=r"expected a scalar loss, found a (sparse_coo|nested) tensor; reduce"):
        poochplan.profile(step, model=model, iterations=1, link=LINK)
