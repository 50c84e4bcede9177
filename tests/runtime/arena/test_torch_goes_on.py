"""What torch does with a tensor's memory works as before where that memory lies in an arena."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing

from poochplan.runtime.arena.arena import Arena
from poochplan.runtime.arena.library import Library
from tests.runtime.arena.steps import filled, holds, places

KIB = 1024


@pytest.fixture
def arena(native: Library) -> Iterator[Arena]:
    """Four places of 8 KiB, and this thread is served."""
    arena = Arena(places(*[(8 * KIB, 8 * KIB * number, 0) for number in range(4)]), 32 * KIB)
    with arena.step():
        yield arena
    gc.collect()
    arena.close()
    assert arena.live_blocks == 0


def test_an_array_of_numpy_holds_the_tensors_place(arena: Arena) -> None:
    array = filled(8 * KIB, 1).numpy()
    assert arena.live_blocks == 1
    with arena.step():
        other = filled(8 * KIB, 2)  # the same place again
        assert arena.fates().taken == 1
    assert (bool((array == 1).all()), holds(other, 2)) == (True, True)
    back = torch.from_numpy(array)
    del array
    back += 1
    assert holds(back, 2)
    del back
    assert arena.live_blocks == 0


def test_a_tensor_that_is_resized_moves_and_keeps_its_content(arena: Arena) -> None:
    tensor = filled(8 * KIB, 3)
    tensor.resize_(16 * KIB)
    assert tensor[: 8 * KIB].aminmax() == (3, 3)  # an array of numpy's would forbid to resize it
    assert arena.live_blocks == 0
    tensor.resize_(100)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(8 * KIB)  # served
    assert arena.live_blocks == 1


def test_a_tensor_that_is_cloned_when_written_is_its_own(arena: Arena) -> None:
    tensor = filled(8 * KIB, 4)
    lazy = torch._lazy_clone(tensor)
    tensor += 1
    assert (holds(tensor, 5), holds(lazy, 4)) == (True, True)
    del lazy, tensor
    assert arena.live_blocks == 0


def test_sharing_a_tensor_moves_it_out_and_another_process_writes_it(arena: Arena) -> None:
    tensor = filled(8 * KIB, 1)
    tensor.share_memory_()
    assert (holds(tensor, 1), arena.live_blocks) == (True, 0)
    process = torch.multiprocessing.get_context("fork").Process(target=tensor.fill_, args=(6,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert holds(tensor, 6)


def test_many_blocks_that_die_in_any_order_are_all_forgotten(native: Library) -> None:
    before = native.live_blocks()
    chance = random.Random(0)
    held = [torch.empty(chance.randrange(1, 3000), dtype=torch.uint8) for _ in range(30_000)]
    assert native.live_blocks() == before + 30_000
    for _ in range(60_000):
        held[chance.randrange(30_000)] = torch.empty(chance.randrange(1, 3000), dtype=torch.uint8)
    assert native.live_blocks() == before + 30_000
    chance.shuffle(held)
    held.clear()
    assert native.live_blocks() == before
