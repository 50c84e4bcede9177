"""The link test takes no more than there is, and says in one line where nothing can be pinned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from poochplan.errors import SpillError
from poochplan.profiler import link as links
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in

MIB = 1 << 20
SIZES = (MIB // 16, MIB // 4, MIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(links, "CUDA_PROBE", (64, 1 << 16))
    with on_stand_in() as machine:
        yield machine
        assert machine.violations == []
        assert machine.host_memory.pinned == {}


def _sizes_measured() -> list[int]:
    return [size for size, _ in links.measure_link(WHERE, sizes=SIZES).outward.curve]


def test_sizes_follow_what_can_be_pinned(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = MIB
    assert _sizes_measured() == list(SIZES[:2])


def test_sizes_follow_what_the_device_has_left(gpu: Machine) -> None:
    gpu.memory.limit_bytes = 3 * MIB
    assert _sizes_measured() == list(SIZES[:2])
    assert gpu.memory.peaks["reserved_bytes"] <= 3 * MIB


def test_sizes_follow_what_the_host_has_left(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "available_bytes", lambda: MIB)
    assert _sizes_measured() == [SIZES[0]]


def test_where_nothing_can_be_pinned_one_line_says_what_to_do(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = 4096
    with pytest.raises(SpillError, match=r"128 KiB of host memory that can be pinned, found none .*; free host"):
        links.measure_link(WHERE, sizes=SIZES)
