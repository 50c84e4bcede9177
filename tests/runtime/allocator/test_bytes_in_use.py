"""Bytes in use are never handed out, and what lies in an arena outlives it: whatever steps and threads do."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from poochplan.planner.arena.packing import Block, pack
from poochplan.runtime.allocator.arena import Arena, Miss, Places, Tally
from poochplan.runtime.allocator.library import Library
from tests.depth import seeds
from tests.runtime.allocator.steps import filled, holds, places

KIB = 1024


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_other_places_are_served_from_the_next_step_on_and_what_lives_keeps_its_bytes(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 32 * KIB)
    with arena.serving():
        kept = filled(8 * KIB, 1)
        with pytest.raises(RuntimeError, match="between two steps"):
            arena.lay_out(places((4 * KIB, 0, 0)))
    arena.lay_out(places((4 * KIB, 4 * KIB, 0), (4 * KIB, 8 * KIB, 0)))
    with arena.serving():
        taken, other = filled(4 * KIB, 2), filled(4 * KIB, 3)
        assert (holds(kept, 1), holds(taken, 2), holds(other, 3)) == (True, True, True)
    assert arena.counts().step.taken == Tally(1, 4 * KIB)
    assert other.data_ptr() - kept.data_ptr() == 8 * KIB
    del kept, taken, other
    with arena.serving():
        both = filled(4 * KIB, 2), filled(4 * KIB, 3)
        assert arena.live_blocks == len(both)
    with pytest.raises(ValueError, match=f"within {32 * KIB}"):
        arena.lay_out(places((4 * KIB, 32 * KIB, 0)))
    arena.close()
    with pytest.raises(RuntimeError, match="found one that serves or is closed"):
        arena.lay_out(places((4 * KIB, 0, 0)))


def test_a_place_whose_block_is_alive_is_not_handed_out(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 4 * KIB, 1)), 12 * KIB)
    with arena.serving():
        kept = filled(8 * KIB, 1)  # the plan has it die before the next point
        arena.at(1)
        other = filled(8 * KIB, 2)
        assert holds(kept, 1)
    assert arena.counts().step.taken == Tally(1, 8 * KIB)
    assert arena.misses() == [Miss("taken", 8 * KIB, 1, 1)]
    with arena.serving():  # and so in the next step
        again = filled(8 * KIB, 3)
        assert (holds(kept, 1), holds(other, 2), holds(again, 3)) == (True, True, True)
    del kept
    with arena.serving():
        filled(8 * KIB, 4)
    assert arena.counts().step.served.blocks == 1
    arena.close()


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_a_tensor_outlives_its_arena_and_the_memory_goes_with_the_last(native: Library, way: str) -> None:
    mapped = native.arenas_mapped()
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 8 * KIB, 0)), 16 * KIB)
    with arena.serving():
        first, second = filled(8 * KIB, 1), filled(8 * KIB, 2)
    address = first.data_ptr()
    if way == "closed":
        arena.close()
    else:
        del arena
    del second
    first += 4
    assert holds(first, 5)
    assert (is_mapped(address), native.arenas_mapped()) == (True, mapped + 1)
    del first
    assert native.arenas_mapped() == mapped


def test_an_unused_arena_goes_at_once(native: Library) -> None:
    mapped = native.arenas_mapped()
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    with arena.serving():
        address = filled(8 * KIB, 1).data_ptr()
        assert is_mapped(address)
        arena.close()  # also in its own step
        assert native.arenas_mapped() == mapped
        assert holds(filled(8 * KIB, 2), 2)


class Perturbed:
    """A planned course of births and deaths, followed with random changes; every block has a pattern of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice, count = self.random, 120
        sizes = [choice.choice([4096, 5000, 8192, 12288, 20000, 65536]) for _ in range(count)]
        births = sorted(choice.randrange(400) for _ in range(count))
        self.spans = [(birth, birth + choice.randrange(1, 60), size) for birth, size in zip(births, sizes, strict=True)]
        packing = pack([Block(*span) for span in self.spans])
        points = np.array([birth // 20 for birth, *_ in self.spans])
        self.arena = Arena(Places(np.array(sizes), np.array(packing.offsets), points), packing.arena_bytes)
        self.alive: dict[int, tuple[int, torch.Tensor]] = {}
        self.wrong: list[str] = []
        self.serial = 0

    def birth(self, size_bytes: int) -> int:
        """A new block, which shares no byte with any that is alive."""
        self.serial += 1
        tensor = filled(size_bytes, self.serial % 251)
        begin = tensor.data_ptr()
        for _, other in self.alive.values():
            if begin < other.data_ptr() + other.nbytes and other.data_ptr() < begin + size_bytes:
                self.wrong.append(f"block {self.serial} shares bytes with another")
        self.alive[self.serial] = self.serial % 251, tensor
        return self.serial

    def death(self, serial: int) -> None:
        value, tensor = self.alive.pop(serial)
        if not holds(tensor, value):
            self.wrong.append(f"block {serial} has been written to")
        if self.random.random() < 0.2:  # on another thread
            handed = [tensor]
            del tensor
            thread = threading.Thread(target=handed.clear)
            thread.start()
            thread.join()

    def step(self, disorder: float) -> None:
        """One step; ``disorder`` is the share of births and deaths that are not as planned."""
        differs = lambda: self.random.random() < disorder  # noqa: E731
        due: dict[int, list[int]] = {}
        with self.arena.serving():
            for time in range(470):
                self.arena.at(time // 20)
                for serial in due.pop(time, []):
                    if differs():
                        due.setdefault(time + self.random.randrange(1, 90), []).append(serial)
                    else:
                        self.death(serial)
                for birth, death, size_bytes in self.spans:
                    if birth == time and not differs():
                        due.setdefault(death, []).append(self.birth(size_bytes))
                if differs():
                    due.setdefault(time + self.random.randrange(1, 90), []).append(self.birth(self.spans[0][2]))
        for late in due.values():  # some outlive the step
            for serial in late:
                if self.random.random() < 0.5:
                    self.death(serial)


@pytest.mark.parametrize("seed", seeds(day=4, deep=60))
def test_no_bytes_are_shared_whatever_a_step_does(native: Library, seed: int) -> None:
    course = Perturbed(seed)
    course.step(0.0)
    step = course.arena.counts().step
    assert (step.served.blocks, step.unplanned.blocks, step.taken.blocks, step.unmet.blocks) == (120, 0, 0, 0)
    for disorder in (0.05, 0.3, 0.7):
        course.step(disorder)
    total = course.arena.counts().total
    assert total.taken.blocks > 0
    assert total.unplanned.blocks > 0
    course.arena.close()
    for serial in list(course.alive):
        course.death(serial)
    assert course.wrong == []
    assert course.arena.live_blocks == 0


def test_memory_behind_what_is_kept_is_given_back_but_for_what_lives_there(native: Library) -> None:
    arena = Arena(places((1 << 20, 0, 0), (1 << 20, 1 << 20, 0), (1 << 20, 2 << 20, 0)), 4 << 20)
    with arena.serving():
        low, middle, high = (filled(1 << 20, number) for number in (1, 2, 3))
    del low, high
    if arena.resident_bytes is None:
        pytest.skip("this kernel does not tell")
    assert arena.resident_bytes >= 3 << 20
    arena.lay_out(places((1 << 20, 0, 0)), kept_bytes=1 << 20)
    assert arena.resident_bytes == 2 << 20
    assert bool((middle == 2).all())
    del middle
    arena.lay_out(places(), kept_bytes=0)
    assert arena.resident_bytes == 0
    arena.close()
