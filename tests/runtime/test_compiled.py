"""A ``torch.compile``d submodule compiles as often with profile and session as without, and its gradients are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Profile
from tests.runtime.compiled_nets import WAYS, Chained, compiled, followed, profiled, train
from tests.runtime.random_plans import random_plan


def chain() -> nn.Module:
    return Chained(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())


class Compiled(nn.Module):
    """Plain layers around a block that is compiled."""

    def __init__(self, how: str, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True))
        self.block = compiled(chain(), how, backend)
        self.after = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.after(self.block(self.before(batch)))


def whole(how: str, backend: Callable[..., Any]) -> nn.Module:
    return compiled(chain(), how, backend)


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _counting() -> tuple[Callable[..., Any], dict[str, int]]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    counts = {"forward": 0, "backward": 0, "calls": 0}

    def compiler(which: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            counts[which] += 1

            def run(*args: Any) -> Any:
                counts["calls"] += 1
                return graph(*args)

            return make_boxed_func(run)

        return compile_graph

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward")), counts


Made = tuple[nn.Module, torch.Tensor, dict[str, int]]


def _fresh(how: str, kind: Callable[..., nn.Module] = Compiled) -> Made:
    """A network, its batch, and how often it was compiled and called so far."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, counts = _counting()
    return kind(how, backend), torch.randn(16, 32), counts


def _plain(how: str, steps: int, kind: Callable[..., nn.Module] = Compiled) -> tuple[list[list[torch.Tensor]], Any]:
    model, batch, counts = _fresh(how, kind)
    reference = train(model, batch, steps)
    assert counts["calls"] > 0
    return reference, counts


def _profiled(how: str, plain: dict[str, int], kind: Callable[..., nn.Module] = Compiled, mode: str = "run") -> Profile:
    """It compiles as often there."""
    model, batch, counts = _fresh(how, kind)
    profile = profiled(model, batch, mode=mode)
    assert (counts["forward"], counts["backward"]) == (plain["forward"], plain["backward"])
    return profile


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("weights", [(0, 1, 0), (1, 1, 2)], ids=["swap", "mixed"])
def test_it_compiles_as_often_and_runs_compiled_as_often(how: str, weights: tuple[float, float, float]) -> None:
    reference, plain = _plain(how, 3)
    profile = _profiled(how, plain)
    assert any(op.name == "compiled_region" and op.opaque for op in profile.ops)
    model, batch, counts = _fresh(how)
    followed(random_plan(profile, 0, weights), model, batch, reference)
    assert counts == plain


@pytest.mark.parametrize("how", WAYS)
def test_profiled_while_swapping_it_compiles_as_often_and_the_profile_is_the_same(how: str) -> None:
    reference, plain = _plain(how, 2)
    in_core, swapping = (_profiled(how, plain, mode=mode) for mode in ("run", "swap-all"))
    assert swapping.ops_fingerprint == in_core.ops_fingerprint
    assert swapping.in_core_peak_bytes == in_core.in_core_peak_bytes
    assert [value.unreplayable for value in swapping.values] == [value.unreplayable for value in in_core.values]
    assert [note[:23] for note in swapping.notes] == ["every saved value was o"]
    model, batch, counts = _fresh(how)
    followed(random_plan(swapping, 0, (1, 1, 2)), model, batch, reference)
    assert counts == plain


def test_what_a_compiled_region_saves_is_swapped_but_never_recomputed() -> None:
    model, batch, _ = _fresh("wrapped")
    profile = profiled(model, batch)
    region = next(index for index, op in enumerate(profile.ops) if op.name == "compiled_region")
    saved = {handle.value for handle in profile.handles}
    born = [profile.values[value] for value in profile.ops[region].outputs if value in saved]
    assert born
    assert all(value.unreplayable == "compiled_region cannot be run again" for value in born)
    assert any(not value.pinned for value in born)


@pytest.mark.parametrize("how", WAYS)
def test_a_model_compiled_as_a_whole_compiles_as_often_and_picks_its_plan_by_its_inputs(how: str) -> None:
    reference, plain = _plain(how, 3, whole)
    profile = _profiled(how, plain, whole)
    assert profile.inputs == ("0 float32[16, 32]",)
    model, batch, counts = _fresh(how, whole)
    report = followed(poochplan.PlanSet([random_plan(profile, 0, (0, 1, 0))]), model, batch, reference)
    assert counts == plain
    assert report.total.out_bytes > 0
