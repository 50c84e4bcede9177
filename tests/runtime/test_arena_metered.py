"""What a served step takes is told with its arena whole, and what a replay keeps of generators is none of torch's."""

from __future__ import annotations

import warnings

import msgspec
import pytest
import torch

import poochplan
from poochplan.runtime.allocator.arena import Arena
from poochplan.runtime.allocator.library import library
from poochplan.runtime.metering.allocated import AllocatedPeak
from poochplan.runtime.replays.recorded import set_state_of, state_of
from tests.runtime.allocator.steps import filled, places
from tests.runtime.nets import CASES
from tests.runtime.served import SETTLED, Loop, needs_compiler, plan_of, served

pytestmark = [pytest.mark.cpu_device, needs_compiler]
ARENA_BYTES, SERVED_BYTES, OUTSIDE_BYTES = 1 << 20, 8192, 4608


def test_an_arena_counts_whole_and_its_blocks_do_not_count_beside_it() -> None:
    peak = AllocatedPeak()
    peak.step_begins()
    peak.looked_around({})
    arena = Arena(places((SERVED_BYTES, 0, 0)), ARENA_BYTES)
    with arena.serving():
        inside = filled(SERVED_BYTES, 1)
    outside = filled(OUTSIDE_BYTES, 2)
    assert arena.live_blocks == 1
    assert peak.peak_bytes == SERVED_BYTES + OUTSIDE_BYTES
    peak.arena_bytes = ARENA_BYTES
    assert peak.peak_bytes == ARENA_BYTES + OUTSIDE_BYTES
    assert peak.blocks_peak_bytes == SERVED_BYTES + OUTSIDE_BYTES
    del inside, outside
    arena.close()


def test_what_is_gone_before_there_is_an_arena_does_not_count_beside_it_and_one_that_rests_has_counted() -> None:
    peak = AllocatedPeak()
    peak.step_begins()
    peak.looked_around({})
    gone = filled(OUTSIDE_BYTES, 2)
    del gone
    peak.arena_bytes = ARENA_BYTES
    assert peak.peak_bytes == ARENA_BYTES
    peak.arena_bytes = 0
    outside = filled(OUTSIDE_BYTES, 2)
    assert peak.peak_bytes == ARENA_BYTES
    del outside


def test_the_most_with_an_arena_stands_when_something_from_before_the_allocator_dies() -> None:
    peak = AllocatedPeak()
    earlier = torch.frombuffer(bytearray(SERVED_BYTES), dtype=torch.uint8).untyped_storage()
    peak.step_begins()
    peak.looked_around({0: earlier})
    peak.arena_bytes = ARENA_BYTES
    outside = filled(OUTSIDE_BYTES, 2)
    del outside, earlier
    assert peak.peak_bytes == ARENA_BYTES + SERVED_BYTES + OUTSIDE_BYTES


def test_an_evaluation_within_a_step_has_the_memory_of_the_arena_that_rests_meanwhile() -> None:
    with served("attention", meter="always") as loop:
        assert loop.session is not None
        peaks = []
        for evaluates in (*[False] * SETTLED, True, False):
            loop.optimizer.zero_grad(set_to_none=True)
            loop.session.step()
            if evaluates:
                with torch.no_grad():
                    loop.loss_of()
                filled(loop.arena.size_bytes // 2, 1)
            loop.step()
            peaks.append(loop.session.report().last_step.peak_bytes)
        assert loop.is_served_whole
        assert peaks[-3] == peaks[-2] == peaks[-1]


def test_what_lies_in_an_arena_as_a_step_begins_is_no_part_of_what_lies_beside_it() -> None:
    peak = AllocatedPeak()
    arena = Arena(places((SERVED_BYTES, 0, 0)), ARENA_BYTES)
    with arena.serving():
        inside = filled(SERVED_BYTES, 1)
    outside = filled(OUTSIDE_BYTES, 2)
    peak.arena_bytes = ARENA_BYTES
    peak.step_begins()
    peak.looked_around({index: one.untyped_storage() for index, one in enumerate((inside, outside))})
    assert peak.peak_bytes == ARENA_BYTES + OUTSIDE_BYTES
    del inside, outside
    arena.close()


def test_a_served_step_takes_what_the_plan_says_of_its_arena_and_an_unserved_one_what_it_says_of_its_peak() -> None:
    plan = plan_of("residual", "swap")
    with served("residual", plan) as loop:
        assert loop.session is not None
        loop.step()
        report = loop.session.report()
        assert loop.arena.size_bytes > 0
        assert report.last_step.peak_bytes is not None
        beside_bytes = report.last_step.peak_bytes - loop.arena.size_bytes
        assert plan.prediction.arena_peak_bytes is not None
        assert plan.prediction.arena_bytes is not None
        assert beside_bytes >= plan.prediction.arena_peak_bytes - plan.prediction.arena_bytes


def test_a_step_whose_arena_is_above_the_budget_is_told_of_though_its_blocks_are_within() -> None:
    plan = plan_of("attention")
    found = plan.prediction
    assert found.arena_peak_bytes is not None
    with served("attention", plan) as loop:
        loop.step()
        taken_bytes = loop.session.report().last_step.peak_bytes
    assert taken_bytes is not None
    budget_bytes = taken_bytes - 512
    assert found.peak_bytes < budget_bytes
    tight = msgspec.structs.replace(plan, budget_bytes=budget_bytes)
    loop = Loop(CASES["attention"])
    with poochplan.apply(tight, loop.model, arena="on") as loop.session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.steps(SETTLED + 3)
        assert loop.arena.served
    assert sum("more than its budget" in str(one.message) for one in caught) == 1


def test_a_generators_state_is_kept_and_put_back_without_a_block_of_torchs() -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    before = library().live_blocks()
    state = state_of(generator)
    assert library().live_blocks() == before
    first = torch.rand(5, generator=generator)
    set_state_of(generator, state)
    assert torch.equal(torch.rand(5, generator=generator), first)
