"""Where memory is short on the stand-in: for the link test, and under a cap."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import poochplan
from poochplan.errors import UsageError
from poochplan.online.before_plan import free_bytes
from poochplan.profiler import link as links
from poochplan.runtime.devices.cuda import hard_cap
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.cuda_rules.memory import TOTAL_BYTES
from tests.gpu.cases import CASES
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(links, "DEVICE_PROBE", (64, 1 << 16))
    with empty_cache(tmp_path_factory.mktemp("user")), on_stand_in() as machine:
        yield machine
        assert machine.violations == []
        assert machine.host_memory.pinned == {}


def test_auto_has_a_cap_from_its_first_step_on(gpu: Machine) -> None:
    model, step, optimizer = CASES["large"].fresh()
    options: dict[str, Any] = {"budget": "80%", "link": LINK, "quiet": True}
    before = gpu.memory.limit_bytes
    cap_bytes = torch.cuda.memory_allocated() + (64 << 20)
    with poochplan.auto(model, optimizer, cap_bytes=cap_bytes, **options):
        step().backward()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(65 << 20, dtype=torch.uint8, device=WHERE)
    assert gpu.memory.limit_bytes == before
    with pytest.raises(UsageError, match="expected a model on cuda, whose allocator takes a limit, found one on cpu"):
        poochplan.auto(torch.nn.Linear(2, 2), cap_bytes=1, **options)


def test_steps_before_a_plan_have_what_a_cap_leaves(gpu: Machine) -> None:
    """The GPU has more: it does not know the cap."""
    there = torch.ones(1 << 20, dtype=torch.uint8, device=WHERE)
    with hard_cap(WHERE, 16 << 20):
        assert free_bytes(WHERE) == (15 << 20)
    assert free_bytes(torch.device("cuda")) == TOTAL_BYTES - there.nbytes


@pytest.mark.parametrize("configured", ["native", "cudaMallocAsync"])
def test_after_a_cap_there_is_the_limit_of_before(gpu: Machine, configured: str) -> None:
    gpu.memory.backend = configured
    before = gpu.memory.limit_bytes
    with hard_cap(WHERE, 1 << 20), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 20, dtype=torch.uint8, device=WHERE)
    assert gpu.memory.limit_bytes == before


MIB = 1 << 20
SIZES = (MIB // 16, MIB // 4, MIB)


def _sizes_measured() -> list[int]:
    return [size for size, _ in links.measure_link(WHERE, sizes=SIZES).outward.curve]


def test_sizes_follow_what_a_cap_leaves(gpu: Machine) -> None:
    with hard_cap(WHERE, 3 * MIB):
        assert _sizes_measured() == list(SIZES[:2])
    assert gpu.memory.peaks["reserved_bytes"] <= 3 * MIB


def test_sizes_follow_what_the_device_has_left(gpu: Machine) -> None:
    others = torch.empty(TOTAL_BYTES - 4 * MIB, dtype=torch.uint8, device=WHERE)
    assert _sizes_measured() == list(SIZES[:2])
    assert others.nbytes + 4 * MIB == TOTAL_BYTES


def test_sizes_follow_what_the_host_has_left(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "available_bytes", lambda: MIB)
    assert _sizes_measured() == [SIZES[0]]


def test_where_nothing_can_be_pinned_the_link_of_pageable_memory_is_measured(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = 4096
    with warnings.catch_warnings():  # told once in a process
        warnings.simplefilter("ignore")
        assert links.measure_link(WHERE, sizes=SIZES).name == "pageable"
