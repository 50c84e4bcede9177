"""Steps from an arena are the steps they were, whatever else the process does; nothing that lives is overwritten."""

from __future__ import annotations

import gc
import mmap
import threading

import pytest
import torch

import poochplan
from poochplan.runtime.allocator.arena import Arena
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


@pytest.mark.parametrize("when", ["between steps", "before the optimizer"])
def test_an_evaluation_takes_no_place_and_the_next_step_misses_none(when: str) -> None:
    with served("attention") as loop:
        assert loop.is_served_whole
        before = loop.arena.served
        for _ in range(3):
            if when == "between steps":
                with torch.no_grad():
                    loop.loss_of()
                assert loop.arena.served == before
                loop.step()
            else:
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
        held_bytes = arena.resident_bytes
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
        assert arena.resident_bytes == held_bytes
    assert equal(loop.seen, in_core(CASES["attention"], SETTLED + 3))


def _is_given_back(arena: Arena) -> bool:
    """But for a page at the end, and one of the loss that was returned."""
    found = arena.resident_bytes
    return found is not None and found <= 2 * PAGE_BYTES


def _arena_of(loop: Loop) -> Arena:
    """The one that serves the loop's session."""
    (found,) = (one for one in gc.get_objects() if type(one) is Arena and one.resident_bytes)
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


def test_another_thread_that_allocates_all_the_while_changes_nothing() -> None:
    over, broken, rounds = threading.Event(), [], []

    def allocate() -> None:
        while not over.is_set():
            mine = [torch.full((size,), float(size)) for size in (8192, 2048, 1024, 32768)]
            if not all(bool((one == one.numel()).all()) for one in mine):
                broken.append(1)
            rounds.append(1)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        with served("attention", meter="never") as loop:
            while len(rounds) < 20 or len(loop.seen) < 8:
                loop.step()
            assert loop.is_served_whole
    finally:
        over.set()
        thread.join()
    assert not broken
    assert equal(loop.seen, plain("attention", len(loop.seen)).seen)


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
    gc.collect()
    before, name = arenas_mapped(), "residual"
    loop = Loop(CASES[name])
    session = poochplan.apply(plan_of(name), loop.model, arena="on").__enter__()
    loop.steps(SETTLED + 1)
    assert arenas_mapped() == before + 1
    kept, hook = largest_output(loop.model)
    loop.step()
    hook.remove()
    own = kept.pop().detach().fill_(3.0)
    if way == "leaving the block":
        session.__exit__(None, None, None)
    del session
    gc.collect()
    assert arenas_mapped() == before + 1
    others = [torch.full_like(own, 9.0) for _ in range(50)]
    assert bool((own == 3).all())
    assert bool((own + 1 == 4).all())
    loop.optimizer.zero_grad(set_to_none=True)
    loop.step()
    assert bool((own == 3).all())
    loop.optimizer.zero_grad(set_to_none=True)
    del own, others
    gc.collect()
    assert arenas_mapped() == before


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


def test_losses_and_gradients_that_are_kept_stay_as_they_are() -> None:
    with served("attention") as loop:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(4):
            loss = loop.step()
            gradients = [one.grad for one in loop.model.parameters() if one.grad is not None]
            kept += [(one, one.detach().clone()) for one in (loss, *gradients)]
        assert all(torch.equal(one, copy) for one, copy in kept)
    assert equal(loop.seen, plain("attention", len(loop.seen)).seen)


def test_gradients_that_are_zeroed_in_place_stay_the_users() -> None:
    losses = []
    for is_served in (False, True):
        loop = Loop(CASES["attention"])
        session = poochplan.apply(plan_of("attention"), loop.model, arena="on" if is_served else "off")
        with session as loop.session:
            for _ in range(SETTLED + 3):
                loop.optimizer.zero_grad(set_to_none=False)
                loss = loop.loss_of()
                loss.backward()
                loop.optimizer.step()
                losses.append(loss.item())
        if is_served:
            assert loop.is_served_whole
    half = len(losses) // 2
    assert losses[:half] == losses[half:]
