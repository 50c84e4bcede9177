"""The model of PyTorch's caching allocator, against cases worked out by hand from its rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.planner.arena.caching_allocator import CachingAllocator, Reserved, peak_reserved
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


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MB)
    allocator.allocate(512)
    assert allocator.reserved_bytes == 22 * MB


def test_a_segment_serves_requests_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MB)
    assert allocator.reserved_bytes == 20 * MB
    allocator.allocate(5 * MB)
    assert allocator.reserved_bytes == 40 * MB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    thirty, twenty = allocator.allocate(30 * MB), allocator.allocate(20 * MB)
    allocator.free(thirty)
    allocator.free(twenty)
    assert allocator.allocate(18 * MB).address == twenty.address
    assert allocator.allocate(18 * MB).address == thirty.address
    assert allocator.reserved_bytes == 50 * MB


def test_of_free_blocks_of_one_size_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(20 * MB), allocator.allocate(20 * MB)
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(20 * MB).address == 0


def test_free_neighbours_are_joined_so_that_a_larger_request_fits() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MB) for _ in range(4)]
    for piece in (pieces[0], pieces[2], pieces[1], pieces[3]):
        allocator.free(piece)
    allocator.allocate(20 * MB)
    assert allocator.reserved_bytes == 20 * MB


def test_free_blocks_of_different_segments_are_never_joined() -> None:
    allocator = CachingAllocator()
    for piece in [allocator.allocate(10 * MB) for _ in range(2)]:
        allocator.free(piece)
    allocator.allocate(20 * MB)
    assert (allocator.reserved_bytes, allocator.peak.allocated_bytes) == (40 * MB, 20 * MB)


def test_a_live_block_between_free_ones_is_fragmentation() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.allocate(8 * MB) for _ in range(2)]
    allocator.free(pieces[0])
    allocator.allocate(9 * MB)  # 8 MiB and 4 MiB are free, but apart
    assert allocator.reserved_bytes == 40 * MB


def test_a_remainder_above_1_mib_serves_the_next_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MB))
    allocator.allocate(28 * MB)
    assert allocator.allocate(2 * MB).address == 28 * MB
    assert allocator.reserved_bytes == 30 * MB


def test_a_remainder_of_512_bytes_is_split_off_in_the_small_pool() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MB)
    allocator.allocate(MB - 512)
    assert allocator.allocate(512).address == 2 * MB - 512
    assert allocator.reserved_bytes == 2 * MB


def test_a_block_is_not_freed_twice() -> None:
    allocator = CachingAllocator()
    piece = allocator.allocate(512)
    allocator.free(piece)
    with pytest.raises(AssertionError):
        allocator.free(piece)


def test_steps_after_the_first_reuse_what_it_left_and_what_was_before_stays() -> None:
    before = [Block(0, 10, 10 * MB), Block(0, 3, 30 * MB)]  # the second is an input that is let go of
    step = [Block(1, 5, 16 * MB), Block(5, 10, 40 * MB)]
    once = peak_reserved(before, step, 10, steps=1)
    assert once == Reserved(96 * MB, 56 * MB)
    assert peak_reserved(before, step, 10, steps=3) == once


def test_a_block_is_given_back_before_another_of_the_same_time_is_taken() -> None:
    assert peak_reserved([], [Block(0, 1, 20 * MB), Block(1, 2, 20 * MB)], 2).reserved_bytes == 20 * MB


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
    peak = peak_reserved([], blocks, 30)
    assert peak.reserved_bytes >= peak.allocated_bytes >= live_peak(blocks)
    assert peak.reserved_bytes % (2 * MB) == 0
