"""Where a search begins: exact for bytes in proportion, inside the range and soon for any others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poochplan.fitting.aiming import LOOKS, aimed


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 10**4))
def test_of_sizes_in_proportion_the_largest_that_fits_is_aimed_at(
    constant: int, each: int, most: int, start: int
) -> None:
    limit_bytes = constant + each * most + each - 1
    assert aimed(lambda value: constant + each * value, limit_bytes, start, 1, 10**9) == most


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
