"""A step served from an arena, at the places that the plan gives; bytes in use are never handed out."""

from __future__ import annotations

import random
import threading

import msgspec
import numpy as np
import pytest
import torch

from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.planner.arena.packing import Block, pack
from poochplan.runtime.arena.arena import Arena, Places
from poochplan.runtime.arena.library import Library, ThreadScope, lifetimes
from poochplan.runtime.run_report import ArenaReport, Unserved
from poochplan.torch_private.allocation_log import log_allocations
from tests.depth import seeds
from tests.runtime.arena.steps import (
    Net,
    arena_of,
    filled,
    holds,
    is_mapped,
    on_another_thread,
    places,
    recorded,
    resident_bytes,
)

KIB = 1024


def test_a_recorded_step_is_served_whole_and_its_gradients_are_the_same_bits(scope: ThreadScope) -> None:
    net = Net()
    net.step()
    loss, gradients = net.step(), net.gradients()
    events = recorded(net.step, scope)
    arena = arena_of(events)
    for _ in range(3):
        with arena.step():
            assert net.step(arena.at) == loss
        assert arena.fates().served == np.count_nonzero(lifetimes(events, LEAST_PLACED_BYTES)["death"] >= 0) > 20
        assert arena.fates().missed == 0
        assert all(torch.equal(*pair) for pair in zip(net.gradients(), gradients, strict=True))
    assert arena.live_blocks == 0


def test_places_are_where_the_plan_says(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, OUTSIDE, 0), (16 * KIB, 8 * KIB, 0)), 64 * KIB)
    with arena.step():
        first, outside, second = filled(8 * KIB, 1), filled(8 * KIB, 2), filled(16 * KIB, 3)
        assert second.data_ptr() - first.data_ptr() == 8 * KIB
        assert not 0 <= outside.data_ptr() - first.data_ptr() < 64 * KIB
        assert arena.live_blocks == 2
    assert arena.fates() == ArenaReport(served=2, served_bytes=24 * KIB)


def test_only_the_thread_of_the_step_is_served(native: object) -> None:
    arena = Arena(places(*[(8 * KIB, 8 * KIB * number, 0) for number in range(2)]), 64 * KIB)
    held: list[torch.Tensor] = []

    def run() -> None:
        held.append(filled(8 * KIB, 1))

    with arena.step():
        on_another_thread(run)
        assert arena.live_blocks == 0
        run()
    run()
    assert arena.live_blocks == 1


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
    with arena.step():
        over.set()
        thread.join()
        assert arena.live_blocks == 0
        blocks.append(filled(8 * KIB, 2))
        assert arena.live_blocks == 1


def test_what_the_plan_does_not_expect_is_served_ordinarily_and_told(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (16 * KIB, 8 * KIB, 1)), 24 * KIB)
    with arena.step():
        held = [filled(8 * KIB, 1), filled(12 * KIB, 2), filled(100, 3)]
        arena.at(1)
        held.append(filled(16 * KIB, 4))
        arena.at(2)
        held.append(filled(16 * KIB, 5))
    assert arena.fates() == ArenaReport(served=2, served_bytes=24 * KIB, unplanned=2, unplanned_bytes=28 * KIB)
    wrong = [
        Unserved(size_bytes=size, layer=point, why="unplanned") for size, point in ((12 * KIB, "0"), (16 * KIB, "2"))
    ]
    assert arena.report(7, str) == msgspec.structs.replace(arena.fates(), size_bytes=7, unserved=wrong)


def test_the_sequence_finds_its_place_again_at_the_next_point(native: object) -> None:
    rows = [(KIB * (8 + 8 * number), 128 * KIB * number, number // 4) for number in range(12)]
    arena = Arena(places(*rows), 128 * KIB * 12)
    with arena.step():
        filled(rows[0][0], 1)  # three of the first point never come
        filled(999 * KIB, 1)
        arena.at(2)  # none of the second does
        for size_bytes, *_ in rows[8:]:
            filled(size_bytes, 1)
    assert (arena.fates().served, arena.fates().missed) == (5, 1)


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
    with arena.step():
        held = [filled(size * KIB, 1) for size in sizes_kib]
        base = held[0].data_ptr() - offsets_kib[0] * KIB
        assert [(block.data_ptr() - base) // KIB for block in held] == list(offsets_kib)
    assert (arena.fates().served, arena.fates().missed) == (len(held), 0)


def test_torchs_own_log_of_memory_hears_of_served_blocks(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    with arena.step():
        log = log_allocations()
        assert log is not None
        block = torch.empty(8 * KIB, dtype=torch.uint8)
        assert arena.live_blocks == 1
        del block
        told = [size_bytes for kind, _, size_bytes in log.events() or () if kind == "memory_alloc"]
    assert told == [8 * KIB, -8 * KIB]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (places((8192, 100, 0)), "place 0: expected bytes at a multiple of 512 within 65536, found 8192 at 100"),
        (places((8192, 0, 0), (8192, 61440, 0)), "place 1: expected .* found 8192 at 61440"),
        (places((8192, -512, 0)), "place 0: .* found 8192 at -512"),
        (places((0, 0, 0)), "place 0: .* found 0 at 0"),
        (places((8192, 0, 3), (8192, 8192, 2)), "place 1: expected points that never decrease, found 2 after 3"),
        (Places(np.ones(1), np.zeros(2), np.zeros(1)), "found 1 sizes, 2 offsets, 1 points"),
    ],
)
def test_places_that_cannot_be_are_refused(native: object, found: Places, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arena(found, 64 * KIB)


def test_a_closed_arena_serves_nobody(native: object) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="found one that was closed"):
        arena.begin()


def test_other_places_are_served_from_the_next_step_on_and_what_lives_keeps_its_bytes(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 32 * KIB)
    with arena.step():
        kept = filled(8 * KIB, 1)
        with pytest.raises(RuntimeError, match="between two steps"):
            arena.lay_out(places((4 * KIB, 0, 0)))
    arena.lay_out(places((4 * KIB, 4 * KIB, 0), (4 * KIB, 8 * KIB, 0)))
    with arena.step():
        taken, other = filled(4 * KIB, 2), filled(4 * KIB, 3)
        assert (holds(kept, 1), holds(taken, 2), holds(other, 3)) == (True, True, True)
    assert (arena.fates().taken, arena.fates().taken_bytes) == (1, 4 * KIB)
    assert other.data_ptr() - kept.data_ptr() == 8 * KIB
    del kept, taken, other
    with arena.step():
        both = filled(4 * KIB, 2), filled(4 * KIB, 3)
        assert arena.live_blocks == len(both)
    with pytest.raises(ValueError, match=f"within {32 * KIB}"):
        arena.lay_out(places((4 * KIB, 32 * KIB, 0)))
    arena.close()
    with pytest.raises(RuntimeError, match="found one that serves or is closed"):
        arena.lay_out(places((4 * KIB, 0, 0)))


def test_a_place_whose_block_is_alive_is_not_handed_out(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 4 * KIB, 1)), 12 * KIB)
    with arena.step():
        kept = filled(8 * KIB, 1)  # the plan has it die before the next point
        arena.at(1)
        other = filled(8 * KIB, 2)
        assert holds(kept, 1)
    assert (arena.fates().taken, arena.fates().taken_bytes) == (1, 8 * KIB)
    assert arena.report(0, str).unserved == [Unserved(size_bytes=8 * KIB, layer="1", why="taken")]
    with arena.step():  # and so in the next step
        again = filled(8 * KIB, 3)
        assert (holds(kept, 1), holds(other, 2), holds(again, 3)) == (True, True, True)
    del kept
    with arena.step():
        filled(8 * KIB, 4)
    assert arena.fates().served == 1


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_a_tensor_outlives_its_arena_and_the_memory_goes_with_the_last(native: Library, way: str) -> None:
    mapped = native.arenas_mapped()
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 8 * KIB, 0)), 16 * KIB)
    with arena.step():
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
            on_another_thread(handed.clear)

    def step(self, disorder: float) -> None:
        """One step; ``disorder`` is the share of births and deaths that are not as planned."""
        differs = lambda: self.random.random() < disorder  # noqa: E731
        due: dict[int, list[int]] = {}
        with self.arena.step():
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
    assert (course.arena.fates().served, course.arena.fates().missed) == (120, 0)
    taken, unplanned = 0, 0
    for disorder in (0.05, 0.3, 0.7):
        course.step(disorder)
        taken, unplanned = taken + course.arena.fates().taken, unplanned + course.arena.fates().unplanned
    assert taken > 0
    assert unplanned > 0
    course.arena.close()
    for serial in list(course.alive):
        course.death(serial)
    assert course.wrong == []
    assert course.arena.live_blocks == 0


def test_memory_behind_what_is_kept_is_given_back_but_for_what_lives_there_and_all_at_the_end(
    native: Library,
) -> None:
    arena = Arena(places((1 << 20, 0, 0), (1 << 20, 1 << 20, 0), (1 << 20, 2 << 20, 0)), 4 << 20)
    with arena.step():
        low, middle, high = (filled(1 << 20, number) for number in (1, 2, 3))
    del low, high
    if resident_bytes(arena) is None:
        pytest.skip("this kernel does not tell")
    assert resident_bytes(arena) >= 3 << 20
    arena.lay_out(places((1 << 20, 0, 0)), kept_bytes=1 << 20)
    assert resident_bytes(arena) == 2 << 20
    assert bool((middle == 2).all())
    del middle
    arena.lay_out(places((1 << 20, 0, 0)), kept_bytes=0)
    assert resident_bytes(arena) == 0
    mapped = native.arenas_mapped()
    with arena.step():
        address = filled(1 << 20, 1).data_ptr()
        assert is_mapped(address)
        assert 1 << 20 <= resident_bytes(arena) < 4 << 20
        arena.close()  # also in its own step; an unused one goes at once
        assert (native.arenas_mapped(), resident_bytes(arena)) == (mapped - 1, 0)
        assert holds(filled(1 << 20, 2), 2)
