"""A ``torch.compile``d submodule compiles as often with profile and session as without, and its gradients are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from tests.runtime.nets import LINK, equal, snapshot
from tests.runtime.random_plans import random_plan


class Block(nn.Sequential):
    """With a forward of its own: the compiler leaves calls of torch's own containers alone."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self:
            batch = layer(batch)
        return batch


class Compiled(nn.Module):
    """Plain layers around a block that is compiled, by either way of asking for it."""

    def __init__(self, how: str, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True))
        block = Block(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())
        if how == "wrapped":
            block = torch.compile(block, backend=backend)  # type: ignore[assignment]
        else:
            block.compile(backend=backend)
        self.block = block
        self.after = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.after(self.block(self.before(batch)))


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


def _train(model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(3)
    batch = torch.randn(16, 32)
    seen = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        loss.backward()
        seen.append(snapshot(model, loss))
    return seen


def _fresh(how: str) -> tuple[Compiled, dict[str, int]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, counts = _counting()
    return Compiled(how, backend), counts


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("weights", [(0, 1, 0), (1, 1, 2)], ids=["swap", "mixed"])
def test_it_compiles_as_often_and_runs_compiled_as_often(how: str, weights: tuple[float, float, float]) -> None:
    model, plain = _fresh(how)
    reference = _train(model, 3)
    assert plain["calls"] > 0

    model, counts = _fresh(how)
    batch = torch.randn(16, 32)
    profile = poochplan.profile(lambda: model(batch).square().mean(), model=model, iterations=1, link=LINK)
    assert (counts["forward"], counts["backward"]) == (plain["forward"], plain["backward"])
    assert any(op.name == "compiled_region" and op.opaque for op in profile.ops)

    model, counts = _fresh(how)
    with poochplan.apply(random_plan(profile, 0, weights), model) as session:
        planned = _train(model, 3)
    assert counts == plain
    assert equal(reference, planned)
    assert session.report().total.fallbacks == 0


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_profiled_while_swapping_it_compiles_as_often_and_the_profile_is_the_same(how: str) -> None:
    model, plain = _fresh(how)
    reference = _train(model, 2)
    assert plain["calls"] > 0
    batch = torch.randn(16, 32)
    profiles = []
    for mode in ("run", "swap-all"):
        model, counts = _fresh(how)
        step = _step(model, batch)
        profiles.append(poochplan.profile(step, model=model, iterations=1, mode=mode, link=LINK))  # type: ignore[arg-type]
        assert (counts["forward"], counts["backward"]) == (plain["forward"], plain["backward"])
    in_core, swapping = profiles
    assert swapping.ops_fingerprint == in_core.ops_fingerprint
    assert swapping.in_core_peak_bytes == in_core.in_core_peak_bytes
    assert [value.unreplayable for value in swapping.values] == [value.unreplayable for value in in_core.values]
    assert [note[:23] for note in swapping.notes] == ["every saved value was o"]

    model, counts = _fresh(how)
    with poochplan.apply(random_plan(swapping, 0, (1, 1, 2)), model) as session:
        planned = _train(model, 2)
    assert counts == plain
    assert equal(reference, planned)
    assert session.report().total.fallbacks == 0


def _step(model: nn.Module, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model(batch).square().mean()


def test_what_a_compiled_region_saves_is_swapped_but_never_recomputed() -> None:
    model, _ = _fresh("wrapped")
    batch = torch.randn(16, 32)
    profile = poochplan.profile(lambda: model(batch).square().mean(), model=model, iterations=1, link=LINK)
    region = next(index for index, op in enumerate(profile.ops) if op.name == "compiled_region")
    saved = {handle.value for handle in profile.handles}
    born = [profile.values[value] for value in profile.ops[region].outputs if value in saved]
    assert born
    assert all(value.unreplayable == "compiled_region cannot be run again" for value in born)
    assert any(not value.pinned for value in born)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_compiled_as_a_whole_compiles_as_often_and_picks_its_plan_by_its_inputs(how: str) -> None:
    def fresh() -> tuple[nn.Module, dict[str, int]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend, counts = _counting()
        model: Any = Block(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())
        if how == "wrapped":
            model = torch.compile(model, backend=backend)
        else:
            model.compile(backend=backend)
        return model, counts

    model, plain = fresh()
    reference = _train(model, 3)
    assert plain["calls"] > 0
    model, counts = fresh()
    batch = torch.randn(16, 32)
    profile = poochplan.profile(lambda: model(batch).square().mean(), model=model, iterations=1, link=LINK)
    assert (counts["forward"], counts["backward"]) == (plain["forward"], plain["backward"])
    assert profile.inputs == ("0 float32[16, 32]",)
    model, counts = fresh()
    with poochplan.apply(poochplan.PlanSet([random_plan(profile, 0, (0, 1, 0))]), model) as session:
        planned = _train(model, 3)
    assert counts == plain
    assert equal(reference, planned)
    assert session.report().total.fallbacks == 0
    assert session.report().total.out_bytes > 0
