"""Which of a step's values the processor's cache still holds."""

from __future__ import annotations

from poochplan.profiler.fake.op_bench import Recency, cache_bytes


def test_what_was_touched_lately_is_there_and_the_oldest_goes_first() -> None:
    recency = Recency(10)
    for value in (1, 2, 1, 3):
        recency.touch(value, 4)
    assert [recency.holds(value) for value in (1, 2, 3)] == [True, False, True]


def test_a_value_larger_than_the_cache_leaves_nothing_there() -> None:
    recency = Recency(10)
    recency.touch(1, 4)
    recency.touch(2, 11)
    assert not recency.holds(1)
    assert not recency.holds(2)
    recency.touch(3, 10)
    assert recency.holds(3)


def test_a_value_touched_again_takes_its_room_once() -> None:
    recency = Recency(10)
    for _ in range(5):
        recency.touch(1, 6)
    recency.touch(2, 4)
    assert recency.holds(1)


def test_a_processor_has_a_cache() -> None:
    assert cache_bytes() >= 64 << 10
