"""Packing: nothing that lives together overlaps, no arena is below the peak of live bytes, nothing is random; and the
searches that make an arena smaller find known best ones, within their work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.profile_parts import rounded_up
from poochplan.planner.arena.packing import THOROUGH, WAITS, Block, live_peak, pack, place_all
from tests.depth import tries
from tests.processes import without_compiler

UNIT = 512
QUICK = settings(deadline=None, derandomize=True, max_examples=tries(50, 1000))
BLOCKS = st.lists(
    st.builds(
        lambda start, life, size: Block(start, start + life, size),
        st.integers(-5, 30),
        st.integers(1, 25),
        st.one_of(st.integers(0, 3000), st.sampled_from([512, 1024, 4096])),
    ),
    max_size=30,
)


def bytes_at(blocks: list[Block], time: int) -> int:
    """Bytes live at a time, each block in whole units."""
    return sum(rounded_up(b.size_bytes) for b in blocks if b.start <= time < b.end)


def many_blocks(count: int) -> list[Block]:
    rng = random.Random(count)
    starts = [rng.randrange(count) for _ in range(count)]
    return [Block(start, start + rng.randint(1, 60), rng.randint(1, 1 << 22)) for start in starts]


def cut_rectangle(pieces: int, time: int, units: int, seed: int) -> list[Block]:
    """Blocks that fill an arena of ``units`` without a gap: a rectangle, cut in two again and again."""
    rng = random.Random(seed)
    rectangles = [(0, time, units)]
    while len(rectangles) < pieces:
        start, end, size = rectangles.pop(rng.randrange(len(rectangles)))
        if rng.random() < 0.5 and end - start > 1:
            at = rng.randrange(start + 1, end)
            rectangles += [(start, at, size), (at, end, size)]
        elif size > 1:
            at = rng.randrange(1, size)
            rectangles += [(start, end, at), (start, end, size - at)]
        else:
            rectangles.append((start, end, size))
    rng.shuffle(rectangles)
    return [Block(start, end, size * UNIT) for start, end, size in rectangles]


def step_like(count: int, seed: int) -> list[Block]:
    """Many tiny and short blocks, and larger ones that are freed in the order in which a backward pass frees them."""
    rng = random.Random(seed)
    blocks = []
    for k in range(count):
        if k % 4 == 0:
            early, late = rng.randrange(k + 1), 2 * count - rng.randrange(k + 1)
            blocks.append(Block(min(early, late), max(early, late) + 1, UNIT << rng.randrange(8, 14)))
        else:
            start = rng.randrange(2 * count)
            blocks.append(Block(start, start + rng.randint(1, 4), rng.randint(1, 40 * UNIT)))
    return blocks


def spans_of(blocks: list[Block]) -> np.ndarray:
    return np.array([(b.start, b.end, -(-b.size_bytes // UNIT)) for b in blocks], dtype=np.int64).T.copy()


def overlaps(blocks: list[Block], offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs that share bytes while both live, found by a sweep over times."""
    moments = sorted([(b.start, 1, k) for k, b in enumerate(blocks)] + [(b.end, 0, k) for k, b in enumerate(blocks)])
    live: set[int] = set()
    found = []
    for _, begins, k in moments:
        if not begins:
            live.remove(k)
            continue
        high = offsets[k] + rounded_up(blocks[k].size_bytes)
        found += [
            (j, k) for j in live if offsets[j] < high and offsets[k] < offsets[j] + rounded_up(blocks[j].size_bytes)
        ]
        live.add(k)
    return found


# -- places ----------------------------------------------------------------------------------------------------


@QUICK
@given(blocks=BLOCKS)
def test_live_blocks_share_no_byte_in_an_arena_that_ends_with_the_highest_above_the_bound(blocks: list[Block]) -> None:
    packing = pack(blocks)
    offsets = packing.offsets
    assert len(offsets) == len(blocks)
    assert not overlaps(blocks, offsets)
    assert all(offset >= 0 and offset % UNIT == 0 for offset in packing.offsets)
    assert packing.lower_bound_bytes == max((bytes_at(blocks, block.start) for block in blocks), default=0)
    assert packing.lower_bound_bytes == live_peak(blocks)
    ends = [offset + block.size_bytes for offset, block in zip(packing.offsets, blocks, strict=True)]
    assert packing.arena_bytes == rounded_up(max(ends, default=0))
    assert packing.arena_bytes >= packing.lower_bound_bytes
    assert pack(list(blocks)) == packing, "the same blocks get the same places"


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [Block(0, 1, 1)],
        [Block(0, 1, 4096), Block(1, 2, 4096)],  # one after the other
        [Block(0, 3, 512), Block(0, 3, 1024), Block(1, 2, 4096)],  # all at once
        [Block(start, 20 - start, 512 * (1 + start % 3)) for start in range(10)],  # as a stack: forward, then backward
        [Block(0, 2, 512), Block(1, 3, 512), Block(2, 4, 512), Block(3, 5, 512)],  # a chain of which two live at once
        [Block(0, 4, 1024), Block(0, 1, 512), Block(3, 6, 512), Block(5, 8, 1024), Block(4, 5, 512)],
    ],
    ids=["nothing", "one", "in turn", "at once", "stack", "chain", "two sizes"],
)
def test_blocks_that_can_be_packed_without_a_gap_are(blocks: list[Block]) -> None:
    packing = pack(blocks)
    assert packing.arena_bytes == packing.lower_bound_bytes


def test_thousands_of_blocks_come_close_to_the_bound() -> None:
    packing = pack(many_blocks(2000))
    assert packing.lower_bound_bytes <= packing.arena_bytes <= 1.1 * packing.lower_bound_bytes


@pytest.mark.parametrize("block", [Block(3, 3, 512), Block(3, 2, 512), Block(0, 1, -1)])
def test_a_block_without_a_lifetime_or_of_negative_size_is_refused(block: Block) -> None:
    with pytest.raises(ValueError, match="expected blocks with start < end"):
        pack([Block(0, 1, 512), block])


# -- searches ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_evaluator")
@pytest.mark.parametrize("seed", range(6))
def test_a_rectangle_that_was_cut_is_put_together_again(seed: int) -> None:
    packing = pack(cut_rectangle(14, 40, 1000, seed), THOROUGH)
    assert packing.lower_bound_bytes == 1000 * UNIT
    assert packing.arena_bytes == packing.lower_bound_bytes


@pytest.mark.usefixtures("compiled_evaluator")
@pytest.mark.parametrize("make", [partial(cut_rectangle, 200, 300, 5000), partial(step_like, 1500)])
def test_a_search_gives_places_without_an_overlap_and_a_longer_one_no_larger_arena(
    make: Callable[[int], list[Block]],
) -> None:
    blocks = make(1)
    quick, longer, none = pack(blocks), pack(blocks, 60_000_000), pack(blocks, 0)
    assert longer.lower_bound_bytes <= longer.arena_bytes <= none.arena_bytes
    assert quick.arena_bytes <= none.arena_bytes
    for packing in (quick, longer, none):
        assert not overlaps(blocks, packing.offsets)
        assert all(offset % UNIT == 0 and offset >= 0 for offset in packing.offsets)
    assert min(quick.arena_bytes, longer.arena_bytes) < none.arena_bytes or none.arena_bytes == none.lower_bound_bytes


@pytest.mark.usefixtures("compiled_evaluator")
def test_a_search_ends_with_an_arena_that_is_small_enough() -> None:
    blocks = cut_rectangle(200, 300, 5000, 1)
    none, longer = pack(blocks, 0), pack(blocks, 20_000_000)
    enough_bytes = (none.arena_bytes + longer.arena_bytes) // 2
    packing = pack(blocks, 20_000_000, enough_bytes)
    assert longer.arena_bytes < packing.arena_bytes <= enough_bytes < none.arena_bytes
    assert pack(blocks, 20_000_000, none.arena_bytes) == none


@pytest.mark.usefixtures("compiled_evaluator")
def test_without_room_for_all_a_search_ends_with_its_allowance_and_says_who_waits() -> None:
    spans = spans_of([Block(0, 4, 3 * UNIT), Block(1, 3, 3 * UNIT), Block(2, 6, 3 * UNIT), Block(4, 6, UNIT)])
    offsets = np.full(4, WAITS, dtype=np.int64)
    left, looks = place_all(spans, offsets, 8, np.ones(4, dtype=np.int64), 500, 0)
    assert left == 1 == (offsets == WAITS).sum()
    assert 500 <= looks < 600


def test_without_a_compiler_first_fit_gives_the_same_places_and_no_search_follows() -> None:
    code = """
        from poochplan.planner.arena.packing import THOROUGH, pack
        from tests.planner.test_packing import cut_rectangle, step_like
        print(*(pack(blocks, {}) for blocks in (cut_rectangle(60, 80, 900, 2), step_like(80, 5))), sep="\\n")
    """
    found = [str(pack(blocks, 0)) for blocks in (cut_rectangle(60, 80, 900, 2), step_like(80, 5))]
    assert (
        without_compiler(code.format(0)).splitlines() == without_compiler(code.format("THOROUGH")).splitlines() == found
    )
