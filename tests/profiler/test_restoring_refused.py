"""What a profile could not put back is refused before the first step, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import poochplan
from poochplan.errors import UsageError
from tests.profiler.restoring import BATCH, Net, profile_of
from tests.runtime.nets import LINK


class Counted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(batch)


@pytest.mark.parametrize("mode", ["run", "swap-all", "auto", "fake"])
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda module: torch.jit.trace(module, BATCH)], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_before_the_first_step(make: Callable[[nn.Module], nn.Module], mode: str) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model = Counted(make(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    options = {} if mode == "fake" else {"iterations": 1}
    with pytest.raises(UsageError, match=r"expected modules in Python, found TorchScript .* in inner"):
        poochplan.profile(
            lambda: model(BATCH).square().sum(), model=model, optimizer=optimizer, mode=mode, link=LINK, **options
        )
    assert model.calls == 0
    assert all(torch.equal(x, y) for x, y in zip(before, (*model.parameters(), *model.buffers()), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_is_torchscript_itself_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found TorchScript .* in the model itself"):
        profile_of(torch.jit.script(nn.Linear(8, 8)))


def test_a_lazy_module_is_refused_and_stays_lazy() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(UsageError, match="found weight of 1 not yet initialised"):
        profile_of(model)
    assert torch.nn.parameter.is_lazy(model[1].weight)
    model(BATCH)
    profile_of(model)


def _of_another_mode(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    with FakeTensorMode():
        model.register_buffer("odd", torch.zeros(3))
    return "odd"


def _on_meta(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    optimizer.state[model.first.weight]["odd"] = torch.zeros(3, device="meta")
    return "optimizer state of first.weight odd"


def _uncopyable(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    optimizer.state[model.first.weight]["odd"] = (number for number in range(3))
    return "optimizer"


@pytest.mark.parametrize("put", [_of_another_mode, _on_meta, _uncopyable])
def test_what_has_no_content_that_can_be_kept_is_refused_by_name(put: Callable[..., str]) -> None:
    calls: list[object] = []
    model = Net(calls.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = put(model, optimizer)
    with pytest.raises(UsageError, match=f"^{name}: expected "):
        profile_of(model, optimizer)
    assert calls == []
