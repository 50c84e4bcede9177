"""A ``torch.compile``d submodule compiles as often with profile and session as without, its gradients are equal, and
its peaks are predicted and metered as the allocator has them: temporaries inside included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.capture import capture as capturing
from poochplan.profiler.capture.workspace import CpuMeter, Workspace
from tests.live_bytes import LiveBytes
from tests.runtime.compiled_nets import WAYS, Chained, compiled, followed, profiled, train
from tests.runtime.nets import equal, taken
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


@pytest.mark.parametrize("around", ["the model", "the step"])
def test_a_loop_may_compile_code_around_the_model_that_auto_is_given(around: str, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = chain(), torch.randn(16, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if around == "the model" else model

        def turn() -> torch.Tensor:
            optimizer.zero_grad()
            loss = called(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, turn if around == "the model" else torch.compile(turn, backend="aot_eager")

    found = []
    for is_auto in (False, True):
        model, optimizer, turn = made()
        auto = poochplan.auto(model, optimizer, budget="80%", cache=tmp_path, quiet=True)
        with auto if is_auto else contextlib.nullcontext():
            found.append([*(turn() for _ in range(6)), *(one.detach().clone() for one in model.parameters())])
    assert equal(found[:1], found[1:])


SLACK_BYTES = 16 * 512
"""What a meter in exact bytes is below one that rounds each storage up to 512."""
HELD_BYTES = 28 * 512
"""What the profile's mode holds longer where the compiler gives up between two parts: 0.5% of the peak."""


class Block(nn.Module):
    """Large temporaries in forward and backward, and a part that comes back piece by piece."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        wide = self.up(self.norm(batch))
        wide = wide * torch.sigmoid(wide) + torch.tanh(wide)
        scores = (batch @ batch.transpose(-1, -2) / 8).softmax(-1)
        return batch + self.down(wide) + scores @ batch


class BrokenBlock(Block):
    """The compiler gives up in its middle: two compiled parts, and what the first saves dies in the second."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        wide = self.up(self.norm(batch)).tanh()
        torch._dynamo.graph_break()
        wide = wide * torch.sigmoid(wide)
        return batch + self.down(wide.exp().log1p())


class Blocks(nn.Module):
    """Compiled blocks between plain layers."""

    def __init__(self, kind: type[Block], how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(compiled(kind(32), how, "aot_eager") for _ in range(3))
        self.between = nn.Linear(32, 32)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = self.between(block(batch)).relu()
        return batch


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize(
    ("kind", "how", "slack_bytes"),
    [
        (Block, "wrapped", SLACK_BYTES),
        (Block, "in place", SLACK_BYTES),
        (BrokenBlock, "wrapped", SLACK_BYTES + HELD_BYTES),
    ],
    ids=["wrapped", "in place", "broken"],
)
def test_no_step_of_compiled_blocks_is_above_its_predicted_peak(
    kind: type[Block], how: str, slack_bytes: int, mode: Literal["run", "swap-all"]
) -> None:
    model, batch = Blocks(kind, how), torch.randn(8, 96, 32)
    reference = train(model, batch)
    profile = profiled(model, batch, mode=mode)
    smallest = smallest_budget(profile)
    peaks = set()
    for share in (1.0, 0.7, 0.4, 0.0):
        budget = int(smallest + share * (profile.in_core_peak_bytes - smallest))
        plan = poochplan.plan(profile, budget, evaluations=100)
        predicted = max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes)
        with poochplan.apply(plan, model, meter="always") as session:
            metered = train(model, batch)
            report = session.report()
        assert equal(reference, metered)
        assert report.last_step.peak_bytes is not None
        if report.arena is None:
            assert predicted - slack_bytes <= report.last_step.peak_bytes <= predicted <= budget
        else:  # the arena counts whole, beside what a region takes before the step's first save point
            assert plan.prediction.arena_peak_bytes is not None
            assert report.last_step.peak_bytes <= plan.prediction.arena_peak_bytes <= budget
        with poochplan.apply(plan, model, meter="never"), LiveBytes(batch, *model.parameters()) as judge:
            train(model, batch, before=judge.restart)
        assert 0.98 * predicted <= judge.peak <= predicted  # it does not see what an op takes inside
        peaks.add(predicted)
    assert len(peaks) > 2


def test_what_a_backward_unpacks_lives_until_it_is_let_go_of_not_until_its_handle_dies() -> None:
    class Slow(torch.autograd.Function):
        """Drops its handles, as compiled backwards do, and then makes something large."""

        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            made = batch * 2
            ctx.save_for_backward(made)
            return batch.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            ctx.maybe_clear_saved_tensors()
            large = torch.ones(64, 4096)
            return gradient * saved * large.mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, 1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return Slow.apply(batch * self.scale)

    model, batch = Net(), torch.randn(64, 4096)
    profile = taken(lambda: model(batch).sum(), model)
    saved = next(value for value in profile.values if value.name.endswith("/mul#2"))
    large = next(index for index, op in enumerate(profile.ops) if op.name == "aten.ones.default")
    assert saved.freed >= profile.op_ticks[large]


def test_without_the_allocator_regions_beside_another_profiler_are_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capturing, "workspace_of", lambda where: Workspace(CpuMeter))
    with torch.profiler.profile():
        profile = profiled(Blocks(Block, "wrapped"), torch.randn(8, 96, 32))
    assert profile.facts is not None
    assert profile.facts.unmeasured_regions == 6
    assert any("another profiler was on" in line for line in profile.advice())
