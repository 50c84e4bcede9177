"""Mode auto on the CPU asks a step without memory what the in-core step would take, and leaves nothing of it behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from poochplan.errors import StepError
from poochplan.profiler import profiling
from poochplan.profiler.fake.fake_profile import beside_static, step_without_memory
from poochplan.profiler.live.step_function import StepFunction
from tests.runtime.nets import CASES, Net, taken


def needed(model: nn.Module, step: Any, optimizer: Any = None, accumulate: bool = False) -> int | None:
    draft = step_without_memory(StepFunction(step, model, optimizer, torch.device("cpu"), accumulate=accumulate))
    return None if draft is None else beside_static(draft)


@pytest.mark.parametrize("name", ["residual", "attention", "recurrent"])
def test_what_is_needed_is_the_peak_less_what_is_there_before_the_first_step(name: str) -> None:
    model, step, optimizer = CASES[name].fresh()
    profile = taken(step, model, optimizer)
    there = sum(profile.static_bytes[kind] for kind in ("parameter", "buffer", "input"))
    assert needed(model, step, optimizer) == profile.in_core_live_peak_bytes - there


def test_state_that_is_there_already_is_not_needed_again() -> None:
    model, batch = nn.Linear(256, 256), torch.randn(4, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        return model(batch).square().mean()  # type: ignore[no-any-return]

    before = needed(model, step, optimizer)
    step().backward()
    optimizer.step()
    state_bytes = 2 * 4 * (256 * 256 + 256)
    assert abs(before - needed(model, step, optimizer) - state_bytes) < 4096


def test_what_a_model_keeps_of_a_step_without_memory_is_taken_back() -> None:
    def masked(net: Net, batch: torch.Tensor) -> torch.Tensor:
        if net.mask is None:  # kept, as models keep their masks
            net.mask = (net.inner.weight.detach()[0] > 0).float()
        return net.inner(batch) * net.mask  # type: ignore[operator, no-any-return]

    model, batch = Net(masked, inner=nn.Linear(8, 8), mask=None), torch.randn(4, 8)
    assert needed(model, lambda: model(batch).sum()) is not None
    assert model.mask is None
    assert taken(lambda: model(batch).sum(), model, mode="auto").mode == "run"
    assert type(model.mask) is torch.Tensor


def test_what_goes_with_an_installed_hook_stays() -> None:
    def hooked(net: Net, batch: torch.Tensor) -> torch.Tensor:
        if not net.hooked:  # in its first forward, which it remembers, as transformers do
            net.hooked = True
            net.register_forward_hook(lambda *_: setattr(net, "seen", net.seen + 1))
        return net.inner(batch)  # type: ignore[no-any-return]

    model, batch = Net(hooked, inner=nn.Linear(8, 8), hooked=False, seen=0), torch.randn(4, 8)
    assert needed(model, lambda: model(batch).sum()) is not None
    before = model.seen
    model(batch)
    assert model.seen == before + 1


def test_a_step_that_fails_without_data_says_nothing_of_that(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> torch.Tensor:
        return torch.mm(model(batch), torch.empty(8, 8).detach().nonzero().float()).sum()

    assert needed(model, step) is None
    assert not caplog.records


def test_a_step_that_keeps_one_outside_the_model_is_one_clear_line() -> None:
    model, batch, kept = nn.Linear(8, 8), torch.randn(4, 8), {}

    def step() -> torch.Tensor:
        if "mask" not in kept:
            kept["mask"] = model(batch).detach()
        return (model(batch) * kept["mask"]).sum()  # type: ignore[no-any-return]

    with pytest.raises(StepError, match="which it kept outside the model; keep it in the model, or profile in mode"):
        taken(step, model, mode="auto")
    assert isinstance(kept["mask"], FakeTensor)


def test_a_step_that_only_runs_with_data_is_swapped_until_its_need_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(64, 8)

    def step() -> torch.Tensor:
        out = model(batch)
        return out[out > 0].sum()  # type: ignore[no-any-return]

    said: list[str] = []
    assert needed(model, step) is None
    profile = taken(step, model, mode="auto", progress=said.append)
    assert profile.mode == "run"
    assert any("swapping" in line for line in said)
    monkeypatch.setattr(profiling, "available_bytes", lambda: 0)
    assert taken(step, model, mode="auto").mode == "swap-all"
