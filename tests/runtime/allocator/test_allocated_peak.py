"""What was there before a step counts from its begin, also where only an op of the step tells of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.metering.allocated import AllocatedPeak, step_scope

SMALL_BYTES, ROUNDED_BYTES = 576, 1024


def small() -> torch.UntypedStorage:
    return torch.empty(SMALL_BYTES, dtype=torch.uint8).untyped_storage()


@pytest.fixture
def peak(scope: ThreadScope) -> Iterator[AllocatedPeak]:
    """With a census that found nothing; this thread is in the scope of steps, and then in none."""
    meter = AllocatedPeak()
    meter.step_begins()
    yield meter
    found = step_scope()
    assert found is not None
    found.leave()


def test_what_no_census_found_and_an_op_reads_was_there_all_along(peak: AllocatedPeak) -> None:
    before = small()
    peak.looked_around({})
    known_bytes = peak.peak_bytes
    peak.met(before)
    assert peak.peak_bytes == known_bytes + ROUNDED_BYTES


def test_what_was_born_since_the_census_is_counted_once(peak: AllocatedPeak) -> None:
    peak.looked_around({})
    born = small()
    counted_bytes = peak.peak_bytes
    peak.met(born)
    assert peak.peak_bytes == counted_bytes
