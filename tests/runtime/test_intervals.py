"""Intervals: nothing overlaps, the lowest place is found, and what is given back is there again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.profile_parts import HOST_ALIGNMENT_BYTES, host_aligned
from poochplan.runtime.engine.host_tier import Intervals

SIZES = st.integers(0, 5 * HOST_ALIGNMENT_BYTES)
STEPS = st.lists(
    st.one_of(SIZES.map(lambda size: ("take", size)), st.integers(0, 40).map(lambda at: ("give back", at)))
)


class ByHand:
    """The same, by looking at everything that is taken."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.taken: dict[int, int] = {}
        """First byte -> byte behind."""

    def lowest(self, size: int) -> int:
        at = self.start
        for first, behind in sorted(self.taken.items()):
            if first - at >= size:
                break
            at = behind
        return at

    @property
    def end(self) -> int:
        return max(self.taken.values(), default=self.start)


@settings(deadline=None)
@given(start=st.integers(0, 3 * HOST_ALIGNMENT_BYTES), steps=STEPS)
def test_it_takes_the_lowest_place_that_is_free_and_large_enough(start: int, steps: list[tuple[str, int]]) -> None:
    intervals, by_hand = Intervals(start), ByHand(host_aligned(start))
    sizes: dict[int, int] = {}
    for what, number in steps:
        if what == "take":
            room = max(host_aligned(number), HOST_ALIGNMENT_BYTES)
            expected = by_hand.lowest(room)
            assert intervals.take(number) == expected
            by_hand.taken[expected] = expected + room
            sizes[expected] = number
        elif sizes:
            at = sorted(sizes)[number % len(sizes)]
            intervals.give_back(at, sizes.pop(at))
            del by_hand.taken[at]
        assert intervals._holes[-1][0] == by_hand.end


@settings(deadline=None)
@given(sizes=st.lists(SIZES, min_size=1), chance=st.randoms(use_true_random=False))
def test_what_is_given_back_in_any_order_comes_back_as_one(sizes: list[int], chance: object) -> None:
    intervals = Intervals(HOST_ALIGNMENT_BYTES)
    taken = [(intervals.take(size), size) for size in sizes]
    end = intervals._holes[-1][0]
    chance.shuffle(taken)  # type: ignore[attr-defined]
    for at, size in taken:
        intervals.give_back(at, size)
    assert intervals._holes[-1][0] == HOST_ALIGNMENT_BYTES
    assert intervals.take(end) == HOST_ALIGNMENT_BYTES
    assert len(intervals._holes) == 1


def test_the_time_of_a_placement_does_not_grow_with_what_is_taken() -> None:
    """What it looks at are the holes."""
    intervals = Intervals()
    places = [intervals.take(1) for _ in range(1000)]
    assert len(intervals._holes) == 1
    for place in places[::-1]:
        intervals.give_back(place, 1)
        assert len(intervals._holes) == 1
