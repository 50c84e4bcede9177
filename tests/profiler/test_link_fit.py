"""The line a link is planned with is exact where the curve is a line; a preset is a link by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.errors import UsageError
from poochplan.formats.profile import PRESET_BYTES_PER_S, LinkDirection, preset_link
from poochplan.profiler.link import CURVE_SIZES_BYTES, SIZES_BYTES, fit_line

MIB = 1 << 20
GRIDS = pytest.mark.parametrize("sizes", [SIZES_BYTES, CURVE_SIZES_BYTES])


def ratios(line: LinkDirection) -> dict[int, float]:
    """Seconds that the line says over those measured, by size."""
    return {size: (line.latency_s + size / line.bandwidth_bytes_per_s) / second for size, second in line.curve}


def cached(size: int, slow_from: int = 16 * MIB) -> float:
    """A disk whose small copies end in the page cache."""
    return 2e-5 + min(size, slow_from) / 8.5e9 + max(0, size - slow_from) / 1.8e9


@GRIDS
@settings(max_examples=40, deadline=None)
@given(latency_s=st.floats(1e-6, 3e-3), gb_per_s=st.floats(0.05, 60))
def test_a_line_is_fitted_exactly(sizes: tuple[int, ...], latency_s: float, gb_per_s: float) -> None:
    line = fit_line([(size, latency_s + size / (gb_per_s * 1e9)) for size in sizes])
    assert line.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert line.bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=1e-6)


@GRIDS
def test_a_throttled_link_has_the_throttle_s_rate_and_no_latency(sizes: tuple[int, ...]) -> None:
    line = fit_line([(size, size / 4e8) for size in sizes])
    assert (line.latency_s, line.bandwidth_bytes_per_s) == (0.0, pytest.approx(4e8))


@GRIDS
@settings(max_examples=40, deadline=None)
@given(data=st.data(), latency_s=st.floats(1e-6, 1e-3), gb_per_s=st.floats(0.1, 30))
def test_where_a_line_can_be_within_a_fifth_the_fit_is(
    sizes: tuple[int, ...], data: st.DataObject, latency_s: float, gb_per_s: float
) -> None:
    noise = data.draw(st.lists(st.floats(-0.2, 0.2), min_size=len(sizes), max_size=len(sizes)))
    curve = [
        (size, (latency_s + size / (gb_per_s * 1e9)) / (1 + part)) for size, part in zip(sizes, noise, strict=True)
    ]
    found = ratios(fit_line(curve))
    assert all(0.8 - 1e-3 <= found[size] <= 1.2 + 1e-3 for size in sizes if size >= MIB)


@GRIDS
@pytest.mark.parametrize("slow_from_mib", [1, 4, 16])
def test_large_copies_that_leave_the_page_cache_are_not_planned_at_its_rate(
    sizes: tuple[int, ...], slow_from_mib: int
) -> None:
    found = ratios(fit_line([(size, cached(size, slow_from_mib * MIB)) for size in sizes]))
    large = max(size for size in sizes if size <= 64 * MIB)
    assert found[large] >= 0.8 - 1e-6
    assert found[max(sizes)] >= 0.5 - 1e-6


def test_the_largest_copy_takes_at_most_twice_what_the_line_says() -> None:
    curve = [(size, size / (8e9 if size <= 256 * MIB else 0.2e9)) for size in CURVE_SIZES_BYTES]
    assert ratios(fit_line(curve))[CURVE_SIZES_BYTES[-1]] == pytest.approx(0.5)


def test_small_copies_that_stutter_leave_the_rate_alone() -> None:
    curve = [(size, (5 if size < MIB // 2 else 1) * (1e-5 + size / 12e9)) for size in CURVE_SIZES_BYTES]
    assert fit_line(curve).bandwidth_bytes_per_s == pytest.approx(12e9, rel=0.25)


def test_one_size_and_a_curve_that_falls_still_give_a_line() -> None:
    one = fit_line([(MIB, 1e-3)])
    assert (one.latency_s, one.bandwidth_bytes_per_s) == (0.0, pytest.approx(MIB / 1e-3))
    falling = fit_line([(size, 1 / (1 + number)) for number, size in enumerate(SIZES_BYTES)])
    assert 0 <= falling.latency_s < float("inf")
    assert 0 < falling.bandwidth_bytes_per_s < float("inf")


@pytest.mark.parametrize("name", PRESET_BYTES_PER_S)
def test_a_preset_is_the_same_in_both_directions_and_full_duplex(name: str) -> None:
    link = preset_link(name)
    assert link.name == name
    assert link.outward == link.inward
    assert link.outward.bandwidth_bytes_per_s == PRESET_BYTES_PER_S[name]
    assert (link.outward.latency_s, link.duplex) == (1e-5, 1.0)
    assert (link.interference_out, link.interference_in, link.throttle_bytes_per_s) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("name", "hint"), [("pcie6", "did you mean pcie"), ("", "pcie3, pcie4"), ("12GB/s", "nvlink-c2c")]
)
def test_an_unknown_name_lists_the_names(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        preset_link(name)
    assert "\n" not in str(caught.value)
