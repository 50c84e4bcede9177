"""``auto`` before its plan, where memory holds few values: it runs out nowhere where a step that swaps all fits."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.runtime.devices.pinned import PinnedTier
from tests.cuda_rules.machine import WHERE, Machine
from tests.gpu.cases import Made
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, Case

ROWS, WIDTH = 1024, 32
CAPS = 8
"""So many are tried, from the least with which a step fits that swaps all, to three times what it takes in-core."""


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(PinnedTier.__init__.__kwdefaults__, "page_bytes", 1 << 20)
    with empty_cache(tmp_path):
        yield


class Valley(nn.Module):
    """A U-Net in small: one level is as large as all others together, and its values are used last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in ((2, 16), (16, 16), (16, 16)))
        self.up = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = [nn.functional.gelu(self.down[0](images))]
        for layer in self.down[1:]:
            levels.append(nn.functional.gelu(layer(nn.functional.avg_pool2d(levels[-1], 2))))
        hidden = levels.pop()
        for layer in self.up:
            larger = nn.functional.interpolate(hidden, scale_factor=2.0)
            hidden = nn.functional.gelu(layer(torch.cat([larger, levels.pop()], 1)))
        return self.head(hidden)


def _valley() -> Made:
    images = torch.randn(2, 2, 64, 64).to(WHERE)
    return Valley().to(WHERE), lambda model: model(images).square().mean()


def _layers(*widths: int) -> Case:
    def make() -> Made:
        rows, labels = torch.randn(ROWS, widths[0]).to(WHERE), torch.randint(widths[-1], (ROWS,)).to(WHERE)
        layers = [nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in itertools.pairwise(widths)]
        return nn.Sequential(*layers).to(WHERE), lambda model: nn.functional.cross_entropy(model(rows), labels)

    return Case(make)


CASES = {
    "equal": _layers(*[WIDTH] * 11),
    "valley": Case(_valley),
    "words": _layers(*[WIDTH] * 9, 16 * WIDTH),
    "bulge": _layers(*[WIDTH] * 5, 16 * WIDTH, *[WIDTH] * 5),
}


def _out_bytes(case: Case, way: str, cap_bytes: int | None) -> int | None:
    """Bytes that left the device in the first step; none where memory ran out."""
    gc.collect()
    torch.cuda.empty_cache()
    model, step, optimizer = case.fresh()
    options: dict[str, Any] = {"before_plan": way, "cap_bytes": cap_bytes, "link": LINK, "quiet": True}
    try:
        with poochplan.auto(model, optimizer, budget=cap_bytes or 1 << 40, **options) as session:
            step().backward()
            out_bytes = int(session._engine.segment.report.out_bytes)
            optimizer.step()
    except torch.OutOfMemoryError:
        return None
    return out_bytes


def _most_bytes(gpu: Machine, case: Case, way: str) -> int:
    """The allocator's peak without a cap."""
    gc.collect()
    gpu.memory.most_allocated_bytes = 0
    assert _out_bytes(case, way, None) is not None
    return gpu.memory.most_allocated_bytes


@pytest.mark.parametrize("name", CASES)
def test_it_runs_out_of_memory_nowhere_where_a_step_that_swaps_all_fits(gpu: Machine, name: str) -> None:
    case = CASES[name]
    least_bytes, in_core_bytes = (_most_bytes(gpu, case, way) for way in ("swap", "in-core"))
    caps = [int(least_bytes * (3 * in_core_bytes / least_bytes) ** (number / CAPS)) for number in range(CAPS + 1)]
    fitting = [cap_bytes for cap_bytes in caps if _out_bytes(case, "swap", cap_bytes) is not None]
    assert len(fitting) >= CAPS - 1
    found = [_out_bytes(case, "in-core", cap_bytes) for cap_bytes in fitting]
    left = [out_bytes for out_bytes in found if out_bytes is not None]
    assert left == found, "it has run out of memory"
    assert left[-1] == 0 < left[0]
