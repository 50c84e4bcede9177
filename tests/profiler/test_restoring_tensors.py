"""A profile puts back the contents of tensors of every kind, gradients and the optimizer's among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.profiler.step.preserve import preserved
from tests.profiler.restoring import BATCH, Net, everything, train
from tests.runtime.nets import LINK


def _tied() -> nn.Module:
    model = Net()
    model.last.weight = model.first.weight
    return model


def _views_of_one_storage() -> nn.Module:
    model, flat = Net(), torch.randn(128)
    model.first.weight, model.last.weight = (nn.Parameter(flat[i : i + 64].view(8, 8)) for i in (0, 64))
    return model


def _with_buffer(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> nn.Module:
    model = Net(lambda net: change(net.odd))
    model.register_buffer("odd", tensor)
    return model


def _sparse() -> torch.Tensor:
    return torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied parameters": _tied,
    "parameters that share a storage": _views_of_one_storage,
    "expanded buffer": lambda: _with_buffer(torch.ones(1).expand(4), lambda t: t[:1].add_(1)),
    "complex buffer": lambda: _with_buffer(torch.ones(3, dtype=torch.complex64), lambda t: t.mul_(2j)),
    "empty buffer": lambda: _with_buffer(torch.empty(0), lambda t: t.resize_(4).fill_(1)),
    "resized buffer": lambda: _with_buffer(torch.ones(4), lambda t: t.untyped_storage().resize_(64)),
    "sparse buffer": lambda: _with_buffer(_sparse(), lambda t: t.add_(torch.ones(2, 2).to_sparse())),
    "compressed sparse buffer": lambda: _with_buffer(torch.eye(2).to_sparse_csr().mul(3), lambda t: t.values().add_(1)),
    "quantized buffer": lambda: _with_buffer(
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), lambda t: t.fill_(0.5)
    ),
    "bfloat16 buffer": lambda: _with_buffer(torch.ones(3, dtype=torch.bfloat16).view(torch.int16), lambda t: t.add_(1)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*quantiz.*:UserWarning")
def test_tensors_of_every_kind_are_back(name: str) -> None:
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters())
    before = _content_of_kind(model), _everything_dense(model, optimizer)
    with preserved(model, optimizer):
        train(model, optimizer)
        assert (_content_of_kind(model), _everything_dense(model, optimizer)) != before
    assert (_content_of_kind(model), _everything_dense(model, optimizer)) == before


def _content_of_kind(model: nn.Module) -> object:
    odd = getattr(model, "odd", None)
    if odd is None:
        return None
    dense = odd.to_dense() if odd.layout is not torch.strided else odd
    dense = dense.dequantize() if dense.is_quantized else dense
    nbytes = odd.untyped_storage().nbytes() if odd.layout is torch.strided else odd.values().numel()
    return id(odd), odd.layout, dense.tolist(), odd.stride() if odd.layout is torch.strided else (), nbytes


def _everything_dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    odd = model._buffers.pop("odd", None)
    try:
        return everything(model, optimizer)
    finally:
        if odd is not None:
            model._buffers["odd"] = odd


def test_jagged_buffers_are_back() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    model = _with_buffer(torch.nested.nested_tensor(rows, layout=torch.jagged), lambda t: t.values().add_(1))
    nested = model.odd
    with preserved(model, None):
        model(BATCH)
        assert nested.values().sum() == 36
    assert model.odd is nested
    assert torch.equal(nested.values(), torch.ones(6, 3))


def test_gradients_that_were_there_are_back_dense_and_sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    tokens = torch.tensor([1, 2, 2])
    model(tokens).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = [g.to_dense().clone() for g in gradients]
    with preserved(model, None):
        for _ in range(2):
            model(tokens).sum().backward()
        model[1].weight.grad = None
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g.to_dense(), b) for g, b in zip(gradients, before, strict=True))


def _lbfgs(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
    plain = optimizer.step
    optimizer.step = lambda: plain(lambda: torch.tensor(1.0))  # type: ignore[method-assign]
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW that can be captured": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "L-BFGS, whose state is lists of tensors": _lbfgs,
}


@pytest.mark.parametrize("trained", [False, True], ids=["without state", "with state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_and_groups_are_back_with_their_identity(name: str, trained: bool) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    if trained:
        for _ in range(3):
            train(model, optimizer)
    before = everything(model, optimizer)
    with preserved(model, optimizer):
        for _ in range(2):
            train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert everything(model, optimizer) != before
    assert everything(model, optimizer) == before


def test_parameters_that_only_the_optimizer_has_are_back() -> None:
    model, scale = Net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*model.parameters(), scale])
    before = everything(model, optimizer)
    poochplan.profile(
        lambda: (model(BATCH).square() * scale).sum(), model=model, optimizer=optimizer, iterations=1, link=LINK
    )
    assert everything(model, optimizer) == before
    assert scale.grad is None
