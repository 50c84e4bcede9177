"""Bytes, rates and budgets are read as a person writes them, and bad ones are refused with what was expected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poochplan.errors import UsageError
from poochplan.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_with_spread,
    parse_budget,
    parse_bytes,
    parse_rate,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("800MB", 800_000_000),
        ("1.5KiB", 1536),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("1e6", 1_000_000),
        ("2TB", 2 * 10**12),
    ],
)
def test_amounts_of_bytes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3GiB", "0", "8 gigs", "8GiB/s", "nan", "inf", "1e999", "8,5GiB", "GiB"])
def test_an_amount_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="spill size: expected bytes such as 8GiB") as caught:
        parse_bytes(text, what="spill size")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("400MB/s", 4e8), ("12GB/s", 1.2e10), ("1GiB/s", float(GIB)), ("1.3 GB", 1.3e9), (2.5e9, 2.5e9)],
)
def test_rates_are_read(text: str | float, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["fast", "0MB/s", "-1GB/s", "12GB/h", "", "inf"])
def test_a_rate_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="throttle: expected a rate such as 400MB/s"):
        parse_rate(text, what="throttle")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60%", 600),
        ("62.5 %", 625),
        ("110%", 1100),
        ("0.6", 600),
        (".25", 250),
        (0.6, 600),
        ("1.0", 1000),
        (1.0, 1000),
        ("8GiB", 8 * GIB),
        ("700", 700),
        (700, 700),
        (60, 60),
        ("101", 101),
        ("60B", 60),
    ],
)
def test_a_budget_is_a_share_of_the_in_core_peak_or_bytes(text: str | float, expected: int) -> None:
    assert parse_budget(text, in_core_peak_bytes=1000) == expected


@pytest.mark.parametrize("text", ["60", " 60 ", "1", "1.5", "62.5", "100"])
def test_a_bare_number_that_was_meant_as_a_share_is_asked_about(text: str) -> None:
    with pytest.raises(UsageError, match=f"found '{text}'; did you mean {text.strip()}%\\?$"):
        parse_budget(text, in_core_peak_bytes=1000)


@pytest.mark.parametrize("text", ["lots", "", "%", "-60%", "0%", "0", "0.0", "60 percent", "8GiB%", "inf%"])
def test_a_budget_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="budget: expected 60%, 8GiB, 800MB or bytes, found") as caught:
        parse_budget(text, in_core_peak_bytes=1000)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (12.5 * 2**20, "12.5 MiB"),
        (345 * 2**20, "345 MiB"),
        (1.25 * GIB, "1.25 GiB"),
        (2048 * GIB, "2.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_are_written_with_three_digits(size_bytes: float, expected: str) -> None:
    assert format_bytes(size_bytes) == expected


@given(st.integers(min_value=1024, max_value=2**50))
def test_written_bytes_read_back_to_within_one_percent(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (1.254, "1.25 s"), (0.0372, "37.2 ms"), (8.1e-6, "8.1 us"), (3e-9, "3 ns"), (-0.5, "-500 ms")],
)
def test_seconds_are_written_with_a_unit(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "spread_s", "expected"),
    [
        (0.0372, 0.0004, "37.2 ms ±0.4"),
        (1.254, 0.0312, "1.25 s ±0.031"),
        (8.1e-6, 2.5e-4, "8.1 us ±2.5e+02"),
        (0.0372, 0.0, "37.2 ms"),
        (0.0372, float("nan"), "37.2 ms"),
        (0.0, 0.1, "-"),
    ],
)
def test_a_spread_has_the_unit_of_what_spreads(seconds: float, spread_s: float, expected: str) -> None:
    assert format_with_spread(seconds, spread_s) == expected


@pytest.mark.parametrize(
    ("rate", "expected"), [(1.3e9, "1.3 GB/s"), (4e8, "400 MB/s"), (2e3, "2 kB/s"), (12, "12 B/s")]
)
def test_rates_are_written_in_decimal_units(rate: float, expected: str) -> None:
    assert format_rate(rate) == expected
    assert parse_rate(expected) == rate
