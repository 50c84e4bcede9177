"""The model of PyTorch's caching allocator, against cases worked out by hand from its rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.planner.arena.caching_allocator import BEHIND_FIXED, CachingAllocator, Reserved, peak_reserved
from poochplan.planner.arena.packing import Block, live_peak

KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "reserved_bytes", "allocated_bytes"),
    [
        (1, 2 * MB, 512),
        (MB, 2 * MB, MB),
        (MB + 1, 20 * MB, MB + 512),
        (10 * MB - 512, 20 * MB, 10 * MB - 512),
        (10 * MB, 10 * MB, 10 * MB),
        (10 * MB + 1, 12 * MB, 10 * MB + 512),
        (11 * MB, 12 * MB, 12 * MB),  # 1 MiB left is too little to be split off
        (19 * MB, 20 * MB, 20 * MB),
    ],
)
def test_the_first_request_takes_a_segment_of_its_kind(
    size_bytes: int, reserved_bytes: int, allocated_bytes: int
) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size_bytes)
    assert allocator.peak == Reserved(reserved_bytes, allocated_bytes)


STEPS: dict[str, tuple[list[int], int, dict[int, int]]] = {
    "small and large requests never share a segment": ([2 * MB, 512], 22 * MB, {}),
    "a segment serves requests until it is full": ([5 * MB] * 4, 20 * MB, {}),
    "and then there is another": ([5 * MB] * 5, 40 * MB, {}),
    "the smallest free block that fits is taken": (
        [30 * MB, 20 * MB, -1, -2, 18 * MB, 18 * MB], 50 * MB, {3: 30 * MB, 4: 0},
    ),
    "of free blocks of one size the lowest address is taken": ([20 * MB, 20 * MB, -2, -1, 20 * MB], 40 * MB, {3: 0}),
    "free neighbours are joined so that a larger request fits": (
        [5 * MB, 5 * MB, 5 * MB, 5 * MB, -1, -3, -2, -4, 20 * MB], 20 * MB, {},
    ),
    "free blocks of different segments are never joined": ([10 * MB, 10 * MB, -1, -2, 20 * MB], 40 * MB, {}),
    "a live block between free ones is fragmentation": ([8 * MB, 8 * MB, -1, 9 * MB], 40 * MB, {}),
    "a remainder above 1 MiB serves the next request": ([30 * MB, -1, 28 * MB, 2 * MB], 30 * MB, {3: 28 * MB}),
    "a remainder of 512 bytes is split off in the small pool": ([MB, MB - 512, 512], 2 * MB, {3: 2 * MB - 512}),
}  # fmt: skip
"""Bytes that are asked for in turn, or minus the number of the request that is freed; what is reserved in the end, and
at which address some requests are. Segments lie one behind the other.
"""

EXPANDED: dict[str, tuple[list[int], int, dict[int, int]]] = {
    "a segment grows by pages of 20 MiB": ([30 * MB, 5 * MB, 6 * MB], 60 * MB, {2: 30 * MB, 3: 35 * MB}),
    "one of small blocks by 2 MiB": ([MB, MB, 512], 4 * MB, {3: 2 * MB}),
    "its free end is part of what it grows by": ([30 * MB, -1, 50 * MB], 60 * MB, {2: 0}),
    "a free block within it is not": ([30 * MB, 10 * MB, -1, 50 * MB], 100 * MB, {3: 40 * MB}),
    "any remainder is split off": ([30 * MB, -1, 30 * MB - 512, 2 * MB], 40 * MB, {3: 30 * MB - 512}),
    "its free end is the last that is taken": (
        [10 * MB, 10 * MB, 25 * MB, 2 * MB, -2, 3 * MB], 60 * MB, {5: 10 * MB},
    ),
    "also where it is the smaller one": ([15 * MB, 23 * MB, -1, 2 * MB], 40 * MB, {3: 0}),
    "unless nothing else fits": ([10 * MB, 30 * MB, -1, 12 * MB], 60 * MB, {3: 40 * MB}),
}  # fmt: skip
"""The same with expandable segments."""


@pytest.mark.parametrize(
    ("is_expandable", "name"), [*((False, name) for name in STEPS), *((True, name) for name in EXPANDED)]
)
def test_requests_are_served_as_the_rules_say(is_expandable: bool, name: str) -> None:
    asked, reserved_bytes, addresses = (EXPANDED if is_expandable else STEPS)[name]
    allocator, pieces = CachingAllocator(is_expandable=is_expandable), []
    for size_bytes in asked:
        if size_bytes > 0:
            pieces.append(allocator.allocate(size_bytes))
        else:
            allocator.free(pieces[-size_bytes - 1])
    assert allocator.reserved_bytes == reserved_bytes
    first = BEHIND_FIXED if is_expandable else 0
    assert {number: pieces[number - 1].address - first for number in addresses} == addresses


def test_once_segments_grow_those_from_before_are_used_and_never_grow() -> None:
    allocator = CachingAllocator()
    before = allocator.allocate(12 * MB)
    allocator.free(allocator.allocate(2 * MB))
    allocator.is_expandable = True
    assert allocator.allocate(3 * MB).address == 12 * MB, "the free part of the segment of 20 MiB"
    assert allocator.allocate(30 * MB).address == BEHIND_FIXED
    allocator.free(before)
    assert allocator.allocate(11 * MB).address == 0
    assert allocator.allocate(14 * MB).address == 15 * MB, "the rest of the free part"
    assert allocator.reserved_bytes == (12 + 20 + 40) * MB


def test_a_block_is_not_freed_twice() -> None:
    allocator = CachingAllocator()
    piece = allocator.allocate(512)
    allocator.free(piece)
    with pytest.raises(AssertionError):
        allocator.free(piece)


def test_steps_after_the_first_reuse_what_it_left_and_what_was_before_stays() -> None:
    before = [Block(0, 10, 10 * MB), Block(0, 3, 30 * MB)]  # the second is an input that is let go of
    step = [Block(1, 5, 16 * MB), Block(5, 10, 40 * MB)]
    assert peak_reserved(before, step, 10) == Reserved(96 * MB, 56 * MB)


def test_a_block_is_given_back_before_another_of_the_same_time_is_taken() -> None:
    assert peak_reserved([], [Block(0, 1, 20 * MB), Block(1, 2, 20 * MB)], 2).reserved_bytes == 20 * MB


def test_what_the_first_step_makes_takes_the_place_of_what_it_has_freed() -> None:
    """The next step finds no such place any more."""
    step, state = [Block(1, 5, 40 * MB)], [Block(6, 10, 30 * MB)]
    assert peak_reserved([], step, 10, made_by_first=state).reserved_bytes == 80 * MB
    assert peak_reserved([Block(0, 10, 30 * MB)], step, 10).reserved_bytes == 70 * MB


BLOCKS = st.lists(
    st.builds(
        lambda start, life, size: Block(start, start + life, size),
        st.integers(0, 20),
        st.integers(1, 9),
        st.one_of(st.integers(1, 3 * KB), st.integers(1, 40 * MB)),
    ),
    max_size=40,
)


@settings(deadline=None, derandomize=True)
@given(blocks=BLOCKS)
def test_what_is_reserved_holds_what_is_allocated_and_that_what_is_live(blocks: list[Block]) -> None:
    for is_expandable in (False, True):
        peak = peak_reserved([], blocks, 30, is_expandable=is_expandable)
        assert peak.reserved_bytes >= peak.allocated_bytes >= live_peak(blocks)
        assert peak.reserved_bytes % (2 * MB) == 0
