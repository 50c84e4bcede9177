"""The blocks of a planned step are its live bytes, and a plan says what one arena for them would need."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import networks
from benchmarks.packing import forward_blocks, of_source, same_size_pool
from poochplan.formats.occupancy import live_bytes
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Memory, Op, OpBlock, Phase, Profile
from poochplan.formats.profile_parts import ROOFLINE, rounded_up
from poochplan.planner.arena import step_layout as arena
from poochplan.planner.arena.packing import Block, live_peak
from poochplan.planner.arena.step_layout import blocks_of, layout_of
from poochplan.planner.planning import plan
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Style, keep_all, schedule_of
from poochplan.planner.simulator.simulate import simulate
from tests.depth import tries
from tests.planner.checker import check
from tests.planner.plans import plan_with, random_decisions
from tests.planner.random_profiles import QUICK, profiles, resnet_like, transformer_like, unet_like


def live_at_each_time(blocks: tuple[Block, ...], end: int) -> np.ndarray:
    live = np.zeros(end, dtype=np.int64)
    for block in blocks:
        live[block.start : block.end] += rounded_up(block.size_bytes)
    return live


def with_blocks(profile: Profile, seed: int) -> Profile:
    """The profile of a step whose ops take what they give back in blocks, before, between and behind their outputs."""
    rng = random.Random(seed)
    ops = tuple(_with_blocks(profile, op, rng) for op in profile.ops)
    changed = msgspec.structs.replace(profile, ops=ops)
    return msgspec.structs.replace(changed, in_core_peak_bytes=int(live_bytes(changed).max()))


def _with_blocks(profile: Profile, op: Op, rng: random.Random) -> Op:
    taken = [*range(len(op.outputs)), *(-1 for _ in range(rng.randint(0, 4)))]
    rng.shuffle(taken)
    blocks = []
    for at, output in enumerate(taken):
        until = -1 if output >= 0 else rng.randint(at + 1, len(taken))
        blocks.append(
            OpBlock(
                profile.values[op.outputs[output]].size_bytes if output >= 0 else rng.randint(1, 9000), output, until
            )
        )
    most = behind = 0
    for at in range(len(blocks)):
        alive = [one for one in blocks[: at + 1] if one.until < 0 or one.until > at]
        most = max(most, sum(rounded_up(one.size_bytes) for one in alive))
    behind = sum(rounded_up(one.size_bytes) for one in blocks if one.until < 0)
    return msgspec.structs.replace(op, blocks=tuple(blocks), workspace_bytes=most - behind)


@settings(QUICK, max_examples=tries(20, 200))
@given(profile=profiles(30), seed=st.integers(0, 2**32), share=st.floats(0.4, 1.0))
def test_the_blocks_of_any_schedule_are_live_as_the_checker_and_the_simulator_say(
    profile: Profile, seed: int, share: float
) -> None:
    profile = with_blocks(profile, seed) if seed % 2 else profile
    problem = Problem.of(profile)
    schedule = fit(problem, random_decisions(problem, seed), int(share * profile.in_core_peak_bytes), Style())
    blocks = blocks_of(problem, schedule)
    live = live_at_each_time(blocks.before + blocks.of_step, blocks.end)
    assert live.max() == live_peak(blocks.before + blocks.of_step)
    assert live.max() == check(profile, plan_with(profile, schedule)).peak_bytes
    # Point by point: what is most live until the next one.
    memory, ticks = simulate(problem, schedule).memory_bytes, profile.point_ticks
    windows = pairwise([0, *blocks.point_times, blocks.end]), pairwise([0, *ticks, len(memory)])
    for times, of_memory in zip(*windows, strict=True):
        assert live[slice(*times)].max(initial=0) == memory[slice(*of_memory)].max(initial=0)


@settings(QUICK, max_examples=tries(20, 200))
@given(profile=profiles(30), seed=st.integers(0, 2**32), share=st.floats(0.4, 1.0))
def test_in_a_layout_nothing_overlaps_that_is_taken_before_the_other_is_given_back(
    profile: Profile, seed: int, share: float
) -> None:
    profile = with_blocks(profile, seed)
    problem = Problem.of(profile)
    schedule = fit(problem, random_decisions(problem, seed), int(share * profile.in_core_peak_bytes), Style())
    laid = layout_of(problem, schedule)
    assert laid is not None
    blocks = blocks_of(problem, schedule)
    least_bytes, begin = laid.layout.least_bytes, blocks.point_times[0]
    large = [block for block in blocks.of_step if block.size_bytes >= least_bytes and block.start >= begin]
    assert [block.size_bytes for block in large] == [place.size_bytes for place in laid.layout.places]
    placed = [both for both in zip(large, laid.layout.places, strict=True) if both[1].offset != OUTSIDE]
    assert all(block in blocks.gone_by_next or block.end < blocks.end for block, _ in placed)
    for at, (block, place) in enumerate(placed):
        end = place.offset + place.size_bytes
        assert end <= laid.layout.arena_bytes
        assert sum(time <= block.start for time in blocks.point_times) == place.point
        for other, beside in placed[:at]:
            apart = place.offset >= beside.offset + beside.size_bytes or beside.offset >= end
            assert apart or block.start >= other.end or other.start >= block.end
    live = live_at_each_time(blocks.before + blocks.of_step, blocks.end)
    assert laid.peak_bytes >= live.max()


@pytest.mark.parametrize("make", [resnet_like, unet_like, transformer_like])
def test_every_value_that_comes_back_has_a_second_block(make) -> None:
    profile = make(3)
    problem = Problem.of(profile)
    found = plan(profile, "70%", policy="greedy")
    blocks = blocks_of(problem, schedule_of(found))
    fetched = Counter(block.size_bytes for block in blocks.fetched)
    replayed = Counter(block.size_bytes for block in blocks.replayed)
    sizes = {"swap": Counter(), "recompute": Counter()}  # type: dict[str, Counter[int]]
    for value, planned in enumerate(found.values):
        if planned.decision.value in sizes and problem.first_use_point[value] >= 0:
            sizes[planned.decision.value][planned.size_bytes] += 1
    assert fetched + replayed == sizes["swap"] + sizes["recompute"]
    assert fetched == sizes["swap"]
    before = sum(value.size_bytes for value in profile.values if value.born < 0)
    assert sum(block.size_bytes for block in blocks.before) == before


@pytest.mark.parametrize("make", [resnet_like, unet_like, transformer_like])
def test_a_forward_pass_alone_takes_what_forward_makes_and_lets_go_of_what_only_backward_needs(make) -> None:
    profile = make(3)
    blocks, end = forward_blocks(profile)
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    made = [profile.values[value] for op in forward for value in op.outputs]
    assert Counter(block.size_bytes for block in blocks) == Counter(value.size_bytes for value in made)
    saved = sum(rounded_up(value.size_bytes) for value in made if value.freed > profile.op_ticks[len(forward)])
    live = live_at_each_time(blocks, end)
    assert 0 < live[-1] < saved
    problem = Problem.of(profile)
    whole = blocks_of(problem, keep_all(problem))
    assert live.max() < live_at_each_time(whole.of_step, whole.end).max()


def test_a_pool_by_sizes_has_of_each_size_as_many_blocks_as_live_at_once() -> None:
    spans = ((0, 2, 512), (1, 3, 500), (3, 4, 512), (0, 4, 1024), (2, 4, 2048))  # the second is rounded up
    assert same_size_pool(Block(*span) for span in spans) == 2 * 512 + 1024 + 2048


@pytest.mark.parametrize("phase", ["training", "forward"])
def test_an_arena_takes_no_more_than_a_pool_by_sizes_and_that_no_more_than_blocks_apart(phase: str) -> None:
    row = of_source("AlexNet", 1, phase)
    assert 0 < row["live_bytes"] <= row["arena_bytes"] <= row["same_size_bytes"]
    assert row["same_size_bytes"] <= row["apart_bytes"] + ALLOCATION_UNIT_BYTES * row["blocks"]


def test_the_networks_of_the_source_have_their_published_parameters() -> None:
    with torch.device("meta"):
        found = [networks.alexnet(), networks.googlenet(), networks.inception_resnet()]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in found]
    assert counts == [61_100_840, 6_998_552 + 7_280, 55_843_464]  # batch norm in place of 7,280 biases


def test_a_plan_says_what_an_arena_would_need_and_its_table_how_far_that_is_from_the_bound() -> None:
    found = plan(transformer_like(3), "60%", policy="greedy")
    arena_bytes, live_bytes = found.prediction.arena_bytes, found.prediction.arena_live_bytes
    assert arena_bytes is not None
    assert live_bytes is not None
    assert live_bytes <= found.prediction.peak_bytes
    assert live_bytes <= arena_bytes <= 1.2 * live_bytes
    assert f"{arena_bytes / live_bytes - 1:.1%} above its live peak" in found.rows()["arena"]


@pytest.mark.parametrize(("kind", "name"), [("cuda", "a GPU"), ("cpu", f"h100{ROOFLINE}")])
def test_a_plan_for_a_gpu_or_from_a_roofline_says_nothing_of_an_arena(kind: Literal["cpu", "cuda"], name: str) -> None:
    profile = transformer_like(3)
    device = msgspec.structs.replace(profile.device, kind=kind, name=name)
    elsewhere = msgspec.structs.replace(profile, device=device, memory=Memory.LIVE, mode="fake")
    for budget in ("60%", "100%"):  # most holds an arena too
        made = plan(elsewhere, budget, policy="greedy")
        assert (made.layout, made.prediction.arena_bytes, made.holds_arena) == (None, None, False)
    asked = plan(elsewhere, "150%", arena="on", evaluations=20)
    assert [one for one in (made, asked) if "arena" in one.rows()] == []


def test_with_very_many_blocks_no_arena_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "MOST_BLOCKS", 3)
    assert plan(resnet_like(2), "100%").prediction.arena_bytes is None
