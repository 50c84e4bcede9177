"""Bytes, rates and budgets are read as a person writes them, and bad ones are refused with what was expected."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
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
    [
        ("400MB/s", 4e8),
        ("12GB/s", 1.2e10),
        ("1GiB/s", float(GIB)),
        ("1.3 GB", 1.3e9),
        (2.5e9, 2.5e9),
        ("2 kB/s", 2e3),
        ("12 B/s", 12.0),
    ],
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


@settings(deadline=None)
@given(st.integers(min_value=1024, max_value=2**50))
def test_written_bytes_read_back_to_within_one_percent(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1024), "1.00 KiB"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(12.5 * 2**20), "12.5 MiB"),
        (format_bytes(345 * 2**20), "345 MiB"),
        (format_bytes(1.25 * GIB), "1.25 GiB"),
        (format_bytes(2048 * GIB), "2.00 TiB"),
        (format_bytes(5000 * 2**40), "5000 TiB"),
        (format_seconds(0), "0 s"),
        (format_seconds(1.254), "1.25 s"),
        (format_seconds(0.0372), "37.2 ms"),
        (format_seconds(8.1e-6), "8.1 us"),
        (format_seconds(3e-9), "3 ns"),
        (format_seconds(-0.5), "-500 ms"),
        (format_with_spread(0.0372, 0.0004), "37.2 ms ±0.4"),
        (format_with_spread(1.254, 0.0312), "1.25 s ±0.031"),
        (format_with_spread(8.1e-6, 2.5e-4), "8.1 us ±2.5e+02"),
        (format_with_spread(0.0372, 0.0), "37.2 ms"),
        (format_with_spread(0.0372, float("nan")), "37.2 ms"),
        (format_with_spread(0.0, 0.1), "-"),
        (format_rate(1.3e9), "1.3 GB/s"),
        (format_rate(4e8), "400 MB/s"),
        (format_rate(2e3), "2 kB/s"),
        (format_rate(12), "12 B/s"),
    ],
)
def test_figures_are_written_with_three_digits_and_a_unit_which_a_spread_shares(text: str, expected: str) -> None:
    assert text == expected
