"""What compiled code allocates inside is in the profile as the blocks of its op, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Memory, OpBlock, Phase, Profile
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES, rounded_up
from poochplan.formats.queries import COMPILED_REGION
from poochplan.planner.arena.packing import live_peak
from poochplan.planner.arena.step_layout import blocks_of, taken_by
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import simulate
from tests.runtime.nets import Net, taken
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler, needs_inductor


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _wide(net: Net, batch: torch.Tensor) -> torch.Tensor:
    """Temporaries in forward and backward that are larger than what goes in and out."""
    wide = net.up(batch)
    return net.down(wide * torch.sigmoid(wide) + torch.tanh(wide))  # type: ignore[no-any-return]


def _between(backend: str) -> nn.Module:
    """Compiled modules between plain layers."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        batch = net.first(batch).tanh()
        for module in net.wide:
            batch = batch + module(batch)
        return net.last(batch)  # type: ignore[no-any-return]

    wide = nn.ModuleList(Net(_wide, up=nn.Linear(32, 256), down=nn.Linear(256, 32)) for _ in range(2))
    for module in wide:
        module.compile(backend=backend)
    return Net(body, first=nn.Linear(32, 32), last=nn.Linear(32, 32), wide=wide)


@functools.cache
def _steps(backend: str) -> tuple[Profile, list[int]]:
    """The profile, and the metered peaks of steps that keep everything."""
    torch.manual_seed(0)
    model, batch = _between(backend), torch.randn(64, 32)
    profile = taken(lambda: model(batch).square().mean(), model)
    peaks = []
    with poochplan.apply(random_plan(profile, 0, (1, 0, 0)), model, meter="always", arena="off") as session:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            loss = model(batch).square().mean()
            loss.backward()
            del loss
            peaks.append(session.report().last_step.peak_bytes or 0)
    return profile, peaks


def _most_bytes(blocks: Sequence[OpBlock]) -> int:
    """At any time while the op runs."""
    most = 0
    for now in range(len(blocks)):
        alive = (one for at, one in enumerate(blocks) if at <= now and (one.until > now or one.until < 0))
        most = max(most, sum(rounded_up(one.size_bytes) for one in alive))
    return most


def _check(profile: Profile, peaks: list[int]) -> list[tuple[OpBlock, ...]]:
    """The blocks of each compiled call."""
    assert profile.memory is Memory.ALLOCATED
    calls = [op for op in profile.ops if op.name == COMPILED_REGION]
    assert [op.phase for op in calls] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    found = [taken_by(profile, op) for op in calls]
    for op, blocks in zip(calls, found, strict=True):
        assert {one.output for one in blocks} >= set(range(len(op.outputs)))
        for one in blocks:
            assert one.output < 0 or one.size_bytes == profile.values[op.outputs[one.output]].size_bytes
        most_bytes = op.workspace_bytes + sum(rounded_up(profile.values[value].size_bytes) for value in op.outputs)
        assert most_bytes - 16 * LEAST_PLACED_BYTES <= _most_bytes(blocks) <= most_bytes
    assert set(peaks[1:]) == {profile.in_core_peak_bytes}
    return found


@needs_compiler
def test_compiled_code_has_the_blocks_that_it_takes_and_the_peak_is_metered_to_the_byte() -> None:
    for blocks in _check(*_steps("aot_eager")):
        assert any(one.output < 0 and one.until >= 0 for one in blocks), "it gives something back inside"


@needs_inductor
@pytest.mark.deep
def test_compiled_code_of_inductor_has_the_blocks_that_it_takes() -> None:
    _check(*_steps("inductor"))


@needs_compiler
def test_blocks_of_a_step_with_compiled_calls_are_never_more_than_the_simulator_s_bytes() -> None:
    profile, _ = _steps("aot_eager")
    problem = Problem.of(profile)
    for seed in range(4):
        schedule = schedule_of(random_plan(profile, seed, (1, 1, 0)))
        blocks = blocks_of(problem, schedule)
        most_bytes = live_peak([one for one in (*blocks.before, *blocks.of_step) if one.size_bytes >= 64])
        assert 0.9 * simulate(problem, schedule).peak_bytes < most_bytes <= simulate(problem, schedule).peak_bytes


@needs_compiler
def test_compiled_calls_beside_another_profiler_are_measured_too() -> None:
    with torch.profiler.profile():
        beside, _ = _steps.__wrapped__("aot_eager")
    alone, _ = _steps("aot_eager")
    assert beside.facts.unmeasured_regions == 0
    calls = [[op.workspace_bytes for op in one.ops if op.name == COMPILED_REGION] for one in (beside, alone)]
    assert calls[0] == calls[1]
    assert min(calls[1]) > 0
