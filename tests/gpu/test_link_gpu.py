"""The link of a GPU: pinned copies for the plans, and pageable ones beside them to compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from poochplan.profiler import link as links
from tests.gpu.cases import WHERE

pytestmark = pytest.mark.gpu


def test_pageable_copies_are_measured_beside_pinned_ones(tmp_path: Path) -> None:
    largest = links.LARGEST_PAGEABLE_BYTES if WHERE.type == "cuda" else 1 << 20
    sizes = (largest // 64, largest, 2 * largest)
    link = links.measure_link(WHERE, tmp_path if WHERE.type == "cpu" else None, None, sizes)
    for pinned, pageable in ((link.outward, link.pageable_out), (link.inward, link.pageable_in)):
        assert [size for size, _ in pinned.curve] == list(sizes)
        assert (pageable is None) == (WHERE.type != "cuda")
        if pageable is not None:
            assert [size for size, _ in pageable.curve] == list(sizes[:-1])
            assert all(seconds > 0 for _, seconds in pageable.curve)
            assert pageable.bandwidth_bytes_per_s > 0
