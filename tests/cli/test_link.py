"""``pooch link`` shows what was measured, keeps it, and no state of the cache is an error."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from poochplan.errors import SpillError
from poochplan.formats.profile import Profile
from poochplan.profiler import link as links
from poochplan.profiler.link import CURVE_SIZES_BYTES, cache_path, link_key, measure_link, pageable_curves
from poochplan.runtime.devices.opening import open_device
from tests.cli.conftest import Pooch

CPU = torch.device("cpu")
LINK = "link --throttle 50MB/s"
SIZES = (64 << 10, 256 << 10)


@pytest.fixture(autouse=True)
def cache(pooch: Pooch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_path() == tmp_path / "cache" / "poochplan" / "links.json"
    monkeypatch.setattr(links, "CURVE_SIZES_BYTES", SIZES)
    return cache_path()


def test_the_link_is_shown_measured_once_taken_by_a_profile_and_measured_again_when_asked(
    pooch: Pooch, cache: Path
) -> None:
    first = pooch.ok(LINK)
    assert first.err == ""
    for text in ("Link (spill), measured now", "held to", "both at once", "compute beside copies", "64.0 KiB"):
        assert text in first.out
    before = cache.read_bytes()
    second = pooch.json(LINK)
    assert second["cached"] is True
    assert [size for size, _ in second["outward"]["curve"]] == list(SIZES)
    pooch.ok(f"profile {pooch.small} --throttle 50MB/s --iterations 1 --cached-link -o p.json")
    link = Profile.load("p.json").link
    assert link.outward.bandwidth_bytes_per_s == second["outward"]["bandwidth_bytes_per_s"]
    assert link.throttle_bytes_per_s == 50e6
    assert cache.read_bytes() == before
    assert pooch.json(LINK, "--refresh")["cached"] is False
    assert cache.read_bytes() != before


def test_pageable_copies_are_shown_where_they_were_measured(pooch: Pooch, cache: Path) -> None:
    assert "pageable" not in pooch(LINK).out
    data = json.loads(cache.read_bytes())
    (link,) = data["links"].values()
    assert link["pageable_out"] is link["pageable_in"] is None
    way = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 6e9, "curve": [[1 << 20, 2e-4], [4 << 20, 8e-4]]}
    link |= {"pageable_out": way, "pageable_in": way | {"bandwidth_bytes_per_s": 3e9}}
    cache.write_text(json.dumps(data))
    shown = pooch(LINK).out
    for text in ("out, pageable", "6 GB/s after 10 us", "3 GB/s after 10 us", "Copies of pageable memory", "4.00 MiB"):
        assert text in shown


def test_pageable_copies_have_a_curve_each_way() -> None:
    """On the CPU both ends are ordinary memory: what CUDA runs, without its device."""
    device = open_device(CPU, None, None)
    try:
        for curve in pageable_curves(device, SIZES, device.synchronize):
            assert [size for size, _ in curve] == list(SIZES)
            assert all(seconds > 0 for _, seconds in curve)
    finally:
        device.close()


@pytest.mark.parametrize("content", ["{", '{"version": 99, "links": {}}', None])
def test_a_cache_that_is_broken_or_cannot_be_written_is_no_error(
    pooch: Pooch, cache: Path, content: str | None
) -> None:
    """What else may be broken of one is in ``tests/test_files.py``."""
    if content is None:
        cache.parent.parent.write_text("a file where the folder should be")
    else:
        cache.parent.mkdir(parents=True)
        cache.write_text(content)
    assert pooch.json(LINK)["cached"] is False
    if content is not None:
        assert list(json.loads(cache.read_bytes())["links"]) == [link_key(CPU, None, 50e6)]


def test_another_throttle_or_torch_is_another_link(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {link_key(CPU, None, None), link_key(CPU, None, 50e6)}
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert len(keys | {link_key(CPU, None, None)}) == 3


def test_the_largest_sizes_are_left_out_under_a_throttle_and_where_the_disk_has_no_room(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttled = measure_link(CPU, on_disk, 2e6, CURVE_SIZES_BYTES)
    assert [size for size, _ in throttled.outward.curve] == [64 << 10, 256 << 10]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 5 << 20))
    link = measure_link(CPU, on_disk, None, CURVE_SIZES_BYTES)
    assert [size for size, _ in link.inward.curve] == [64 << 10, 256 << 10, 1 << 20]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    with pytest.raises(SpillError, match=r"expected 256 KiB free in .*, found 1000 B; free space, or name another"):
        measure_link(CPU, on_disk, None, CURVE_SIZES_BYTES)


def test_a_disk_that_is_too_slow_is_one_clear_error(pooch: Pooch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poochplan.profiler.link._LONGEST_FIRST_WRITE_S", 0.0)
    error = pooch.refused(LINK, code=1)
    assert "expected a disk that takes 128 KiB within 0 s" in error
    assert "name a spill directory on a faster disk" in error
