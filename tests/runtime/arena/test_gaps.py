"""Steps that leave out layers: blocks without a free place of their own take gaps of the arena, whose memory stays."""

from __future__ import annotations

import random

import pytest
import torch

from poochplan.formats.plan import OUTSIDE
from poochplan.runtime.arena.arena import Arena
from tests.depth import seeds
from tests.runtime.arena.steps import filled, holds, places, resident_bytes

KIB = 1024
PAGE = 4 * KIB


def within(arena: Arena, block: torch.Tensor, first: torch.Tensor, size_bytes: int) -> bool:
    return 0 <= block.data_ptr() - first.data_ptr() < size_bytes


def test_a_block_that_is_not_expected_takes_the_smallest_gap_once_gaps_are_filled(native: object) -> None:
    kinds = (8 * KIB, 0, 0), (8 * KIB, 24 * KIB, 0), (8 * KIB, 44 * KIB, 0), (8 * KIB, 56 * KIB, 1)
    arena = Arena(places(*kinds), 64 * KIB)
    with arena.step():
        held = [filled(8 * KIB, number) for number in range(3)]
        assert arena.fates().missed == 0
        held.append(filled(12 * KIB, 3))
        assert arena.fates().unplanned == 1
        arena.fill_gaps()
        held.append(filled(12 * KIB, 4))
        assert held[4].data_ptr() - held[0].data_ptr() == 32 * KIB, "12 KiB wide; the others have 16 KiB and more"
        held.append(filled(16 * KIB, 5))
        assert held[5].data_ptr() - held[0].data_ptr() == 8 * KIB
        assert arena.fates().unplanned == 1
    assert all(holds(block, number) for number, block in enumerate(held))


def test_a_block_whose_place_is_in_use_lies_in_a_gap(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 0, 0), (8 * KIB, 16 * KIB, 1)), 24 * KIB)
    with arena.step():
        first = filled(8 * KIB, 1)
        arena.fill_gaps()
        second = filled(8 * KIB, 2)
        assert second.data_ptr() - first.data_ptr() in (8 * KIB, 16 * KIB)
        assert arena.fates().missed == 0
        assert holds(first, 1)
        assert holds(second, 2)


def test_what_is_to_lie_outside_lies_outside(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, OUTSIDE, 0), (32 * KIB, 0, 1)), 32 * KIB)
    with arena.step():
        first = filled(8 * KIB, 1)
        arena.fill_gaps()
        assert not within(arena, filled(8 * KIB, 2), first, 64 * KIB)


def test_a_block_larger_than_every_gap_lies_behind_and_pages_of_the_gaps_are_given_back(native: object) -> None:
    arena = Arena(places(*[(256 * KIB, 256 * KIB * number, 0) for number in range(8)]), 2 << 20)
    if resident_bytes(arena) is None:
        pytest.skip("the kernel does not tell what is resident")
    with arena.step():
        held = [filled(256 * KIB, number) for number in range(8)]
        first = held[0]
        arena.fill_gaps()
        del held[1], held[2]  # the second and the fourth: no two beside each other
        behind = filled(512 * KIB, 9)
        assert behind.data_ptr() - first.data_ptr() >= 2 << 20
        assert holds(behind, 9)
        assert (resident_bytes(arena) or 0) <= 2 << 20
        assert arena.fates().missed == 0
        too_many = filled(256 * KIB, 10)
        assert arena.fates().unplanned == 1, "all pages of the arena are in use"
        assert holds(too_many, 10)
    del behind
    with arena.step():
        again = [filled(256 * KIB, number) for number in range(8)]
        assert (resident_bytes(arena) or 0) <= 2 << 20
        assert all(holds(block, number) for number, block in enumerate(again))


def test_a_noted_block_that_has_died_is_found_as_it_was_if_nothing_has_come_there(native: object) -> None:
    arena = Arena(places(*[(8 * KIB, 8 * KIB * number, 0) for number in range(3)], (8 * KIB, 8 * KIB, 1)), 24 * KIB)
    with arena.step():
        held = [filled(8 * KIB, number) for number in range(3)]
        addresses = [block.data_ptr() for block in held]
        assert arena.note(held[0].untyped_storage()) == 0, "no gaps are filled"
        arena.fill_gaps()
        assert arena.note(torch.zeros(8).untyped_storage()) == 0, "it lies outside"
        first, second, third = (arena.note(block.untyped_storage()) for block in held)
        del held[:2]
        arena.at(1)
        comes = filled(8 * KIB, 7)
        assert comes.data_ptr() == addresses[1]
        assert arena.again(second, 8 * KIB) is None, "another block has come there"
        assert arena.again(third, 8 * KIB) is None, "it is alive"
        storage = arena.again(first, 8 * KIB)
        assert storage is not None
        assert storage.data_ptr() == addresses[0]
        assert holds(torch.empty(0, dtype=torch.uint8).set_(storage), 0)
        assert arena.again(first, 8 * KIB) is None, "a note serves once"
        assert holds(comes, 7)
        later = arena.note(storage)
        del storage
    assert arena.again(later, 8 * KIB) is None, "the step is over"
    other = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    with other.step():
        other.fill_gaps()
        block = filled(8 * KIB, 9)
        assert other.note(block.untyped_storage()) > later, "no number comes twice"


@pytest.mark.parametrize("seed", seeds(6))
def test_random_steps_of_fewer_blocks_keep_their_bytes_and_take_no_more_memory_than_the_arena(
    seed: int, native: object
) -> None:
    chance, offset, kinds = random.Random(seed), 0, []
    for _ in range(40):
        size = 512 * chance.randint(10, 200)
        kinds.append((size, offset, 0))
        offset += size
    arena = Arena(places(*kinds), offset)
    for number in range(4):
        held = dict[int, torch.Tensor]()
        with arena.step():
            for turn in range(200):
                live_bytes = sum(-(-block.nbytes // PAGE) * PAGE + PAGE for block in held.values())
                size = 512 * chance.randint(10, 400)
                if live_bytes + size < offset // 2:
                    held[turn] = filled(size, turn)
                elif held:
                    del held[chance.choice(list(held))]
                if turn == 5 and number == 1:
                    arena.fill_gaps()
                assert all(holds(block, one) for one, block in held.items())
            assert (resident_bytes(arena) or 0) <= -(-offset // PAGE) * PAGE
        if number > 1:
            assert arena.fates().missed == 0
    held.clear()
    assert arena.live_blocks == 0
