"""Steps from an arena are the steps they were, whatever else the process does; nothing that lives is overwritten."""

from __future__ import annotations

import gc
import mmap
import warnings

import msgspec
import pytest
import torch

import poochplan
from poochplan.runtime.arena.arena import Arena
from poochplan.runtime.arena.library import library
from poochplan.runtime.metering.allocated import AllocatedPeak
from poochplan.runtime.replays.replay import set_state_of, state_of
from tests.runtime.arena.steps import filled, places, resident_bytes
from tests.runtime.nets import CASES, equal, in_core
from tests.runtime.served import (
    SETTLED,
    WISHES,
    Loop,
    arenas_mapped,
    largest_output,
    needs_compiler,
    plain,
    plan_of,
    served,
)

PAGE_BYTES = mmap.PAGESIZE
pytestmark = [pytest.mark.cpu_device, needs_compiler]


@pytest.mark.parametrize("kind", WISHES)
@pytest.mark.parametrize("name", CASES)
def test_eight_steps_are_bitwise_those_in_core_and_from_the_fifth_on_served_whole(name: str, kind: str) -> None:
    with served(name, plan_of(name, kind)) as loop:
        for _ in range(8 - SETTLED):
            loop.step()
            assert loop.is_served_whole, loop.arena
        assert loop.session is not None
        assert loop.session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(CASES[name], 8))


def test_an_evaluation_before_the_optimizer_takes_no_place_and_the_next_step_misses_none() -> None:
    with served("attention") as loop:
        before = loop.arena.served
        for _ in range(3):
            loop.optimizer.zero_grad(set_to_none=True)
            loop.loss_of().backward()
            with torch.no_grad():
                loop.loss_of()
            loop.optimizer.step()
            assert loop.arena.unplanned + loop.arena.taken == 0
        loop.step()
        assert loop.is_served_whole
        assert loop.arena.served == before


@pytest.mark.parametrize("what", ["evaluation", "in-core"])
def test_what_runs_between_steps_has_no_idle_arena_beside_it_and_steps_are_served_on(what: str) -> None:
    with served("attention") as loop:
        loop.step()
        arena = _arena_of(loop)
        held_bytes = resident_bytes(arena)
        assert held_bytes is not None
        assert held_bytes > 8 * PAGE_BYTES
        loop.optimizer.zero_grad(set_to_none=True)
        assert loop.session is not None
        if what == "evaluation":
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                loop.loss_of()
            assert _is_given_back(arena)
            assert loop.is_served_whole  # it is told what the last step was
            loop.step()
        else:
            with loop.session.away():
                assert _is_given_back(arena)
                loop.step()
        loop.step()
        assert loop.is_served_whole
        assert resident_bytes(arena) == held_bytes
    assert equal(loop.seen, in_core(CASES["attention"], SETTLED + 3))


def _is_given_back(arena: Arena) -> bool:
    """But for a page at the end, and one of the loss that was returned."""
    found = resident_bytes(arena)
    return found is not None and found <= 2 * PAGE_BYTES


def _arena_of(loop: Loop) -> Arena:
    """The one that serves the loop's session."""
    (found,) = (one for one in gc.get_objects() if type(one) is Arena and resident_bytes(one))
    return found


def test_a_forward_whose_loss_is_dropped_takes_no_place_from_the_next_step() -> None:
    with served("residual") as loop:
        before = loop.arena.served
        loop.optimizer.zero_grad(set_to_none=True)
        loop.loss_of()
        loop.step()
        assert loop.is_served_whole
        assert loop.arena.served == before


def test_of_forwards_that_are_dropped_early_nothing_is_learned() -> None:
    loop = Loop(CASES["residual"])
    with poochplan.apply(plan_of("residual"), loop.model, arena="on") as loop.session:
        for _ in range(5):
            loop.step()
            loop.optimizer.zero_grad(set_to_none=True)
            loop.loss_of()
        loop.steps(SETTLED)
        assert loop.is_served_whole


class _Stop(Exception):
    """Raised in mid-step."""


def _stop(*_: object) -> None:
    raise _Stop


def _stop_in_backward(_: object, __: object, output: torch.Tensor) -> None:
    output.register_hook(_stop)


def _broken_step(loop: Loop, where: str) -> None:
    """One that raises in mid-step, and then those of which the last is served."""
    layer = loop.model.get_submodule("norm")
    hook = layer.register_forward_hook(_stop if where == "forward" else _stop_in_backward)
    loop.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(_Stop):
        loop.loss_of().backward()
    hook.remove()
    mine = torch.full((8192,), 7.0)
    loop.steps(SETTLED + 1)
    assert bool((mine == 7).all())


@pytest.mark.parametrize("settled", [0, 2, SETTLED])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_a_step_that_raises(where: str, settled: int) -> None:
    """``settled``: the steps before; what raises may be metered, written down or served."""
    loop, reference = Loop(CASES["attention"]), Loop(CASES["attention"])
    with poochplan.apply(plan_of("attention"), loop.model, arena="on") as loop.session:
        loop.steps(settled)
        _broken_step(loop, where)
        assert loop.is_served_whole, loop.arena
    torch.manual_seed(1)
    reference.steps(settled)
    _broken_step(reference, where)
    assert equal(loop.seen, reference.seen)


@pytest.mark.parametrize("way", ["leaving the block", "letting go of the session"])
def test_tensors_outlive_their_arena_and_its_memory_goes_with_the_last(way: str) -> None:
    loop = Loop(CASES["residual"])
    session = poochplan.apply(plan_of("residual"), loop.model, arena="on").__enter__()
    loop.steps(SETTLED + 1)
    kept, hook = largest_output(loop.model)
    loop.step()
    hook.remove()
    own = kept.pop().detach()
    if way == "leaving the block":
        session.__exit__(None, None, None)
    del session
    gc.collect()
    loop.optimizer.zero_grad(set_to_none=True)
    assert library().is_served(own.data_ptr())
    mapped = arenas_mapped()  # its own, and what other tests have left
    del own
    assert arenas_mapped() == mapped - 1


@pytest.mark.parametrize("meter", ["never", "first-steps"])
def test_an_activation_that_is_kept_is_never_overwritten_and_the_report_says_what_was_not_served(meter: str) -> None:
    with served("residual", meter=meter) as loop:
        loop.step()
        kept, hook = largest_output(loop.model)
        loop.step()
        hook.remove()
        contents = [one.detach().clone() for one in kept]
        loop.step()
        assert loop.session is not None
        found = loop.arena
        assert found.taken > 0
        assert {one.why for one in found.unserved} >= {"taken"}
        assert found.unserved[0].layer
        assert found.unserved[0].size_bytes > 0
        loop.steps(3)
        assert all(torch.equal(one, content) for one, content in zip(kept, contents, strict=True))
        kept.clear()
    assert equal(loop.seen, plain("residual", len(loop.seen)).seen)


def test_gradients_that_are_zeroed_in_place_stay_the_users() -> None:
    losses: dict[str, list[float]] = {"off": [], "on": []}
    for arena, seen in losses.items():
        loop = Loop(CASES["attention"])
        with poochplan.apply(plan_of("attention"), loop.model, arena=arena) as loop.session:
            for _ in range(SETTLED + 3):
                loop.optimizer.zero_grad(set_to_none=False)
                loss = loop.loss_of()
                loss.backward()
                loop.optimizer.step()
                seen.append(loss.item())
    assert loop.is_served_whole
    assert losses["off"] == losses["on"]


ARENA_BYTES, SERVED_BYTES, OUTSIDE_BYTES = 1 << 20, 8192, 4608


@pytest.fixture
def peak() -> AllocatedPeak:
    """Of a step that has begun, before which there was nothing."""
    found = AllocatedPeak()
    found.step_begins()
    found.looked_around({})
    return found


def test_an_arena_counts_whole_and_its_blocks_do_not_count_beside_it(peak: AllocatedPeak) -> None:
    arena = Arena(places((SERVED_BYTES, 0, 0)), ARENA_BYTES)
    with arena.step():
        inside = filled(SERVED_BYTES, 1)
    outside = filled(OUTSIDE_BYTES, 2)
    assert arena.live_blocks == 1
    assert peak.now().peak_bytes == SERVED_BYTES + OUTSIDE_BYTES
    peak.uses_arena(ARENA_BYTES)
    assert peak.now().peak_bytes == ARENA_BYTES + OUTSIDE_BYTES
    assert peak.now().blocks_bytes == SERVED_BYTES + OUTSIDE_BYTES
    del inside, outside
    arena.close()


def test_what_is_gone_before_there_is_an_arena_does_not_count_beside_it_and_one_that_rests_has_counted(
    peak: AllocatedPeak,
) -> None:
    gone = filled(OUTSIDE_BYTES, 2)
    del gone
    peak.uses_arena(ARENA_BYTES)
    assert peak.now().peak_bytes == ARENA_BYTES
    peak.uses_arena(0)
    outside = filled(OUTSIDE_BYTES, 2)
    assert peak.now().peak_bytes == ARENA_BYTES
    del outside


def test_the_most_with_an_arena_stands_when_something_from_before_the_allocator_dies() -> None:
    peak = AllocatedPeak()
    earlier = torch.frombuffer(bytearray(SERVED_BYTES), dtype=torch.uint8).untyped_storage()
    peak.step_begins()
    peak.looked_around({0: earlier})
    peak.uses_arena(ARENA_BYTES)
    outside = filled(OUTSIDE_BYTES, 2)
    del outside, earlier
    assert peak.now().peak_bytes == ARENA_BYTES + SERVED_BYTES + OUTSIDE_BYTES


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
    with arena.step():
        inside = filled(SERVED_BYTES, 1)
    outside = filled(OUTSIDE_BYTES, 2)
    peak.uses_arena(ARENA_BYTES)
    peak.step_begins()
    peak.looked_around({index: one.untyped_storage() for index, one in enumerate((inside, outside))})
    assert peak.now().peak_bytes == ARENA_BYTES + OUTSIDE_BYTES
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
        assert report.predicted_peak_bytes == plan.prediction.arena_peak_bytes > plan.prediction.peak_bytes


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
