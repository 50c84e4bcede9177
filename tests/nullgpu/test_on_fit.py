"""``fit`` of a workload on a GPU: values are those whose plans reserve no more than the memory that was named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.planner.arena.reserved import in_core_bytes
from poochplan.profiler import link as links
from poochplan.workload import Workload
from tests.nullgpu.test_on_null_gpu import MIB, WHERE
from tests.online.caches import empty_cache

WIDTH, MEMORY_BYTES = 256, 192 * MIB


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(links, "CURVE_SIZES_BYTES", (1 << 16, 1 << 20))  # the largest copy would be a GiB
    with empty_cache(tmp_path):
        yield


def rows_of(kilorows: int) -> Workload:
    rows = torch.randn(1024 * kilorows, WIDTH).to(WHERE)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(WHERE)
    return Workload(model, lambda: model(rows).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_value_found_reserves_no_more_than_the_memory_and_no_plan_of_the_next_one_does() -> None:
    found = poochplan.fit(rows_of, "kilorows", MEMORY_BYTES, time_limit_s=0.3)
    assert found.plan.on == "reserved"
    assert found.plan.covered_bytes <= found.plan.budget_bytes == MEMORY_BYTES
    assert found.profile.device.kind == "cuda"
    assert found.profile.link.name == "pinned", "and not that of a file"
    assert found.in_core_value is not None
    assert found.in_core_value < found.value
    assert in_core_bytes(found.profile) > MEMORY_BYTES
    assert found.following is not None
    assert found.following.value == found.value + 1
    assert not found.following.fits
    assert found.trial is not None
    assert found.trial.peak_bytes is not None
    assert found.trial.peak_bytes > found.plan.prediction.peak_bytes, "reserved bytes, which are more"
    assert found.trial.is_within == (found.trial.peak_bytes <= MEMORY_BYTES)


def test_where_nothing_reserves_so_little_the_fewest_bytes_that_were_found_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"no kilorows 8 was found within .* of reserved bytes: the fewest"):
        poochplan.fit(rows_of, "kilorows", 52 * MIB, low=8, high=8, time_limit_s=0.3)
