"""Bytes live over ticks: each span is live from its first tick to its last, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.occupancy import ints, live_bytes, occupancy
from poochplan.formats.profile import Profile

INSTANCE = Path(__file__).parents[1] / "benchmarks" / "instances" / "seq2seq-v100.json.gz"
SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 14), st.integers(0, 1 << 40)), max_size=12)


@settings(deadline=None)
@given(st.integers(0, 10), SPANS, SPANS)
def test_a_tick_holds_the_bytes_of_every_span_around_it(
    ticks: int, some: list[tuple[int, int, int]], more: list[tuple[int, int, int]]
) -> None:
    columns = [[ints(span[field] for span in spans) for field in range(3)] for spans in (some, more)]
    live = occupancy(ticks, *((first, last, size_bytes) for first, last, size_bytes in columns))
    assert live.dtype == np.int64
    assert live.tolist() == [
        sum(size_bytes for first, last, size_bytes in (*some, *more) if first <= tick <= last) for tick in range(ticks)
    ]


def test_a_value_that_outlives_the_step_is_live_to_its_last_tick() -> None:
    profile = Profile.load(INSTANCE)
    last = profile.tick_count - 1
    values = tuple(
        msgspec.structs.replace(value, freed=value.freed + 7 * (value.freed == last)) for value in profile.values
    )
    assert any(value.freed > last for value in values)
    outliving = msgspec.structs.replace(profile, values=values)
    assert live_bytes(outliving).tolist() == live_bytes(profile).tolist()
