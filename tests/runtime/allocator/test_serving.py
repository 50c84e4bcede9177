"""A step served from an arena, at the places that the plan gives."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from poochplan.formats.plan import OUTSIDE
from poochplan.runtime.allocator.arena import Arena, Fates, Miss, Places, Tally
from poochplan.runtime.allocator.library import ThreadScope
from poochplan.torch_private.tensor_internals import allocation_events, log_allocations
from tests.runtime.allocator.steps import Net, arena_of, filled, places, recorded

NOTHING = Tally(0, 0)
KIB = 1024


def test_a_recorded_step_is_served_whole_and_its_gradients_are_the_same_bits(scope: ThreadScope) -> None:
    net = Net()
    net.step()
    loss, gradients = net.step(), net.gradients()
    events = recorded(net.step, scope)
    arena = arena_of(events)
    for _ in range(3):
        with arena.serving():
            assert net.step(arena.at) == loss
        step = arena.counts().step
        assert step.served.blocks > 20
        assert (step.unplanned, step.taken, step.unmet) == (NOTHING, NOTHING, NOTHING)
        assert all(torch.equal(*pair) for pair in zip(net.gradients(), gradients, strict=True))
    assert arena.live_blocks == 0
    assert arena.counts().total.served.blocks == 3 * step.served.blocks
    arena.close()


def test_places_are_where_the_plan_says(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, OUTSIDE, 0), (16 * KIB, 8 * KIB, 0)), 64 * KIB)
    with arena.serving():
        first, outside, second = filled(8 * KIB, 1), filled(8 * KIB, 2), filled(16 * KIB, 3)
        assert second.data_ptr() - first.data_ptr() == 8 * KIB
        assert not 0 <= outside.data_ptr() - first.data_ptr() < 64 * KIB
        assert arena.live_blocks == 2
    assert arena.counts().step == Fates(Tally(2, 24 * KIB), Tally(1, 8 * KIB), NOTHING, NOTHING, NOTHING)
    arena.close()


def test_only_the_threads_of_the_step_are_served(native: object) -> None:
    arena = Arena(places(*[(8 * KIB, 8 * KIB * number, 0) for number in range(4)]), 64 * KIB)
    held: list[torch.Tensor] = []

    def run(joins: bool) -> None:
        if joins:
            arena.join()
        held.append(filled(8 * KIB, 1))

    with arena.serving():
        for joins in (False, True):
            thread = threading.Thread(target=run, args=(joins,))
            thread.start()
            thread.join()
            assert arena.live_blocks == int(joins)
        arena.leave()
        held.append(filled(8 * KIB, 1))
    held.append(filled(8 * KIB, 1))
    assert arena.live_blocks == 1
    arena.close()


def test_a_thread_of_the_step_before_is_not_served_in_the_next(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 8 * KIB, 0)), 16 * KIB)
    begun, over = threading.Event(), threading.Event()
    blocks: list[torch.Tensor] = []

    def earlier() -> None:
        arena.begin()
        begun.set()
        over.wait()
        blocks.append(filled(8 * KIB, 1))

    thread = threading.Thread(target=earlier)
    thread.start()
    begun.wait()
    with arena.serving():
        over.set()
        thread.join()
        assert arena.live_blocks == 0
        blocks.append(filled(8 * KIB, 2))
        assert arena.live_blocks == 1
    arena.close()


def test_what_the_plan_does_not_expect_is_served_ordinarily_and_told(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (16 * KIB, 8 * KIB, 1)), 24 * KIB)
    with arena.serving():
        held = [filled(8 * KIB, 1), filled(12 * KIB, 2), filled(100, 3)]
        arena.at(1)
        held.append(filled(16 * KIB, 4))
        arena.at(2)
        held.append(filled(16 * KIB, 5))
    step = arena.counts().step
    assert (step.served, step.unplanned) == (Tally(2, 24 * KIB), Tally(2, 28 * KIB))
    assert arena.misses() == [Miss("unplanned", 12 * KIB, 0, 1), Miss("unplanned", 16 * KIB, 2, 2)]
    arena.close()


def test_the_sequence_finds_its_place_again_at_the_next_point(native: object) -> None:
    rows = [(KIB * (8 + 8 * number), 128 * KIB * number, number // 4) for number in range(12)]
    arena = Arena(places(*rows), 128 * KIB * 12)
    with arena.serving():
        filled(rows[0][0], 1)  # three of the first point never come
        filled(999 * KIB, 1)
        arena.at(2)  # none of the second does
        for size_bytes, *_ in rows[8:]:
            filled(size_bytes, 1)
    step = arena.counts().step
    assert (step.served.blocks, step.unplanned.blocks, step.unmet.blocks) == (5, 1, 7)
    arena.close()


@pytest.mark.parametrize(
    ("sizes_kib", "offsets_kib"),
    [((12, 8, 16, 12), (8, 0, 20, 36)), ((8, 16, 12), (0, 20, 36)), ((16, 8, 12), (20, 0, 36))],
    ids=["two change places", "one is missing", "one comes late"],
)
def test_what_comes_in_another_order_finds_its_own_place(
    native: object, sizes_kib: tuple[int, ...], offsets_kib: tuple[int, ...]
) -> None:
    rows = (8, 0), (12, 8), (16, 20), (12, 36)
    arena = Arena(places(*((size * KIB, offset * KIB, 0) for size, offset in rows)), 48 * KIB)
    with arena.serving():
        held = [filled(size * KIB, 1) for size in sizes_kib]
        base = held[0].data_ptr() - offsets_kib[0] * KIB
        assert [(block.data_ptr() - base) // KIB for block in held] == list(offsets_kib)
    step = arena.counts().step
    assert (step.served.blocks, step.unmet.blocks) == (len(held), 4 - len(held))
    arena.close()


def test_torchs_own_log_of_memory_hears_of_served_blocks(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    with arena.serving():
        assert log_allocations()
        block = torch.empty(8 * KIB, dtype=torch.uint8)
        assert arena.live_blocks == 1
        del block
        told = [size_bytes for kind, _, size_bytes in allocation_events() if kind == "memory_alloc"]
    assert told == [8 * KIB, -8 * KIB]
    arena.close()


def test_its_resident_bytes_are_those_that_were_touched(native: object) -> None:
    arena = Arena(places((8 << 20, 0, 0)), 64 << 20)
    assert arena.resident_bytes == 0
    with arena.serving():
        filled(8 << 20, 1)
    assert arena.resident_bytes is not None
    assert 8 << 20 <= arena.resident_bytes < 64 << 20
    arena.close()
    assert arena.resident_bytes == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(8192, 100, 0)], "place 0: expected bytes at a multiple of 512 within 65536, found 8192 at 100"),
        ([(8192, 0, 0), (8192, 61440, 0)], "place 1: expected .* found 8192 at 61440"),
        ([(8192, -512, 0)], "place 0: .* found 8192 at -512"),
        ([(0, 0, 0)], "place 0: .* found 0 at 0"),
        ([(8192, 0, 3), (8192, 8192, 2)], "place 1: expected points that never fall, found 2 behind 3"),
    ],
)
def test_places_that_cannot_be_are_refused(native: object, rows: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arena(places(*rows), 64 * KIB)


def test_arrays_of_different_lengths_are_refused(native: object) -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="found 1 sizes, 2 offsets, 1 points"):
        Arena(Places(one, two, one), 512)


def test_a_closed_arena_serves_nobody(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="found one that was closed"):
        arena.begin()
