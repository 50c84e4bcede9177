"""The pure search: the largest value of any monotonic property, what it says of any other, and where it begins."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.fitting.largest import LOOKS, NEIGHBOURS, SCAN, Found, Gait, aimed, largest

gaits = st.sampled_from(Gait)


def counted(fits: Callable[[int], bool | None]) -> tuple[Callable[[int], bool | None], list[int]]:
    """The property, and a list that grows with each value that is asked for."""
    asked: list[int] = []

    def ask(value: int) -> bool | None:
        asked.append(value)
        return fits(value)

    return ask, asked


@settings(deadline=None)
@given(
    st.integers(1, 10**6), st.integers(0, 10**6), st.integers(-5, 2 * 10**6), st.integers(1, 10**6), gaits
)  # fmt: skip
def test_of_a_monotonic_property_the_largest_value_is_found(
    low: int, width: int, limit: int, start: int, gait: Gait
) -> None:
    high = low + width
    ask, asked = counted(lambda value: value <= limit)
    found = largest(ask, start, low, high, gait)
    assert found.value == (min(limit, high) if limit >= low else None)
    assert found.misfits == ()
    if found.value is not None:
        assert found.following == (found.value + 1 if found.value < high else None)
    assert all(low <= value <= high for value in asked)
    assert len(asked) == len(set(asked))


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40), gaits)
def test_it_asks_no_more_often_than_a_number_has_digits(limit: int, start: int, gait: Gait) -> None:
    ask, asked = counted(lambda value: value <= limit)
    assert largest(ask, start, 1, 1 << 40, gait).value == limit
    assert len(asked) <= 2 * 40 + 1 + NEIGHBOURS


@settings(deadline=None)
@given(st.integers(2, SCAN - 1), st.integers(1, 500), st.integers(0, 10**5), st.integers(1, 10**5), gaits)
def test_values_that_do_not_exist_are_stepped_over(stride: int, first: int, limit: int, high: int, gait: Gait) -> None:
    start = stride * first
    high += start
    found = largest(lambda value: None if value % stride else value <= limit, start, 1, high, gait)
    expected = min(limit, high) // stride * stride
    assert found.value == (expected or None)
    if expected and expected + stride <= high:
        assert found.following == expected + stride


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.integers(1, 60), gaits)
def test_of_any_property_the_value_fits_and_its_next_neighbours_do_not(
    fitting: set[int], start: int, gait: Gait
) -> None:
    found = largest(lambda value: value in fitting, start, 1, 60, gait)
    if found.value is None:
        assert start not in fitting
        return
    assert found.value in fitting
    assert all(value not in fitting for value in range(found.value + 1, min(60, found.value + NEIGHBOURS) + 1))
    assert found.misfits == tuple(sorted(x for x in found.answers if x < found.value and x not in fitting))


def test_a_property_that_is_not_monotonic_is_told() -> None:
    found = largest(lambda value: value <= 20 or value == 23, 1, 1, 100)
    assert (found.value, found.misfits, found.following) == (23, (21, 22), 24)


def test_where_the_range_ends_before_the_property_does_nothing_follows() -> None:
    assert largest(lambda value: True, 3, 1, 100) == Found(
        100, None, (), dict.fromkeys((3, 6, 12, 24, 48, 96, 100), True)
    )


def test_where_nothing_fits_the_smallest_value_was_asked_for() -> None:
    found = largest(lambda value: False, 48, 5, 100)
    assert (found.value, found.following) == (None, 5)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 10**4))
def test_of_sizes_in_proportion_the_largest_that_fits_is_aimed_at(
    constant: int, each: int, most: int, start: int
) -> None:
    limit_bytes = constant + each * most + each - 1
    assert aimed(lambda value: constant + each * value, limit_bytes, start, 1, 10**9) == most


@settings(deadline=None)
@given(
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.integers(1, 2000),
    st.functions(like=lambda value: None, returns=st.one_of(st.none(), st.integers(0, 10**9)), pure=True),
)
def test_of_any_sizes_few_are_asked_for_and_all_in_the_range(low: int, width: int, start: int, sizes: object) -> None:
    high = low + width
    start = min(max(start, low), high)
    asked = []

    def size(value: int) -> int | None:
        asked.append(value)
        return sizes(value)  # type: ignore[operator, no-any-return]

    assert low <= aimed(size, 10**6, start, low, high) <= high
    assert len(asked) <= 1 + LOOKS
    assert all(low <= value <= high for value in asked)
