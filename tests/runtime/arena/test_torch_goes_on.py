"""What torch does with a tensor's memory works as before where that memory lies in an arena."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Iterator

import numpy as np
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
        assert arena.fates().taken.blocks == 1
    assert (bool((array == 1).all()), holds(other, 2)) == (True, True)
    back = torch.from_numpy(array)
    del array
    back += 1
    assert holds(back, 2)
    del back
    assert arena.live_blocks == 0


def test_an_array_that_torch_was_given_stays_numpys(arena: Arena) -> None:
    array = np.full(8 * KIB, 5, np.uint8)
    tensor = torch.from_numpy(array)
    assert arena.live_blocks == 0
    del array
    assert holds(tensor, 5)


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


def test_data_may_be_set_and_storages_swapped(arena: Arena) -> None:
    first, second = filled(8 * KIB, 1), filled(8 * KIB, 2)
    first.data = second
    assert (holds(first, 2), arena.live_blocks) == (True, 1)
    third = filled(8 * KIB, 3)
    second.set_(third.untyped_storage())
    del third
    assert (holds(first, 2), holds(second, 3), arena.live_blocks) == (True, True, 2)


def test_saving_and_copying_give_the_same_bytes(arena: Arena) -> None:
    tensor = filled(8 * KIB, 7)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded, copied = torch.load(file), copy.deepcopy(tensor)
    del tensor
    assert (holds(loaded, 7), holds(copied, 7)) == (True, True)


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


def test_views_hold_the_place_until_the_last_is_gone(arena: Arena) -> None:
    view = filled(8 * KIB, 1)[100:200].view(10, 10).t()
    assert arena.live_blocks == 1
    assert holds(view, 1)
    del view
    assert arena.live_blocks == 0


def test_memory_is_aligned_as_torchs_own(native: Library) -> None:
    arena = Arena(places(*[(8 * KIB + 512 * number, 16 * KIB * number, 0) for number in range(4)]), 64 * KIB)
    with arena.step():
        blocks = [torch.empty(8 * KIB + 512 * number, dtype=torch.uint8) for number in range(4)]
        assert arena.live_blocks == 4
        assert [block.data_ptr() % 64 for block in blocks] == [0] * 4
    arena.close()


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


def test_tensors_from_before_the_allocator_die_in_peace(native: Library) -> None:
    """A storage keeps the allocator that it was made with: what is resized stays with the wrapped one."""
    before = native.live_blocks()
    held = [filled(100_000, number) for number in range(5)]
    assert native.live_blocks() == before + 5
    assert [holds(tensor, number) for number, tensor in enumerate(held)] == [True] * 5
    held.clear()
    assert native.live_blocks() == before
    assert native.is_in_force()
