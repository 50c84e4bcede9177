"""The pure search: the largest value of any monotonic sizes, what it says of any other, and how few it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.fitting.largest import NEIGHBOURS, SCAN, Found, Size, largest


def counted(size: Size) -> tuple[Size, list[int]]:
    """The sizes, and a list that grows with each value that is asked for."""
    asked: list[int] = []

    def ask(value: int) -> float | None:
        asked.append(value)
        return size(value)

    return ask, asked


def told(fits: Callable[[int], bool | None]) -> Size:
    """Sizes of which only their side of the limit is known."""
    return lambda value: {True: -math.inf, False: math.inf, None: None}[fits(value)]


@settings(deadline=None)
@given(
    st.integers(1, 10**6), st.integers(0, 10**6), st.integers(-5, 2 * 10**6), st.integers(1, 10**6),
    st.sampled_from(["told", "line", "square", "root"]),
)  # fmt: skip
def test_of_monotonic_sizes_the_largest_value_that_fits_is_found(
    low: int, width: int, limit: int, start: int, kind: str
) -> None:
    high = low + width
    sizes: dict[str, Size] = {
        "told": told(lambda value: value <= limit),
        "line": lambda value: value,
        "square": lambda value: value * value if limit > 0 else math.inf,
        "root": lambda value: math.isqrt(value),
    }
    most = {"square": limit * limit, "root": math.isqrt(max(limit, 0))}.get(kind, limit)
    if kind == "root":
        limit = (most + 1) ** 2 - 1
    ask, asked = counted(sizes[kind])
    found = largest(ask, most, start, low, high)
    assert found.value == (min(limit, high) if limit >= low else None)
    assert found.misfits == ()
    if found.value is not None:
        assert found.following == (found.value + 1 if found.value < high else None)
    assert all(low <= value <= high for value in asked)
    assert len(asked) == len(set(asked))


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_it_asks_no_more_often_than_a_number_has_digits(limit: int, start: int) -> None:
    ask, asked = counted(told(lambda value: value <= limit))
    assert largest(ask, 0, start, 1, 1 << 40).value == limit
    assert len(asked) <= 2 * 40 + 1 + NEIGHBOURS


@settings(deadline=None)
@given(
    st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 1 << 40), st.integers(1, 1 << 40),
    st.sampled_from([0.2, 1.0, 4.0]),
)  # fmt: skip
def test_any_smooth_sizes_take_few_questions(constant: int, each: int, most: int, start: int, power: float) -> None:
    ask, asked = counted(lambda value: constant + each * float(value) ** power)
    limit = constant + each * float(most) ** power
    largest(ask, limit, start, 1, 1 << 40)
    assert len(asked) <= 4 * 2 * 40 + 4 + NEIGHBOURS


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 10**4))
def test_sizes_in_proportion_take_seven_questions(constant: int, each: int, most: int, start: int) -> None:
    ask, asked = counted(lambda value: constant + each * value)
    assert largest(ask, constant + each * most + each - 1, start, 1, 10**9, 1).value == most
    assert len(asked) <= 7


@settings(deadline=None)
@given(st.integers(2, SCAN - 1), st.integers(1, 500), st.integers(0, 10**5), st.integers(1, 10**5), st.booleans())
def test_values_that_do_not_exist_are_stepped_over(
    stride: int, first: int, limit: int, high: int, is_told: bool
) -> None:
    start = stride * first
    high += start
    sizes: Size = told(lambda value: value <= limit) if is_told else lambda value: value
    found = largest(lambda value: None if value % stride else sizes(value), limit, start, 1, high)
    expected = min(limit, high) // stride * stride
    assert found.value == (expected or None)
    if expected and expected + stride <= high:
        assert found.following == expected + stride


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.integers(1, 60))
def test_of_any_sizes_the_value_fits_and_its_next_neighbours_do_not(fitting: set[int], start: int) -> None:
    ask, asked = counted(told(lambda value: value in fitting))
    found = largest(ask, 0, start, 1, 60)
    if found.value is None:
        assert start not in fitting
        return
    assert found.value in fitting
    assert all(value not in fitting for value in range(found.value + 1, min(60, found.value + NEIGHBOURS) + 1))
    assert found.misfits == tuple(sorted(x for x in asked if x < found.value and x not in fitting))


def test_sizes_that_are_not_monotonic_are_told() -> None:
    found = largest(told(lambda value: value <= 20 or value == 23), 0, 1, 1, 100)
    assert (found.value, found.misfits, found.following) == (23, (21, 22), 24)


def test_where_the_range_ends_before_the_sizes_do_nothing_follows() -> None:
    assert largest(lambda value: 0.0, 1.0, 3, 1, 100) == Found(100, None, ())


def test_where_nothing_fits_the_smallest_value_was_asked_for() -> None:
    found = largest(told(lambda value: False), 0, 48, 5, 100)
    assert (found.value, found.following) == (None, 5)
