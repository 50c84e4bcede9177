"""How much the suite tries: which of its two parts, and whether each claim once or with every seed and network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PART = os.environ.get("POOCH_PART", "")
"""``first`` in ``make test``, ``rest`` in ``make test-all``; both together where it is not set."""
DEEP = os.environ.get("POOCH_DEEP", "") not in ("", "0")
"""``make test-all DEEP=1``: the tests marked ``deep`` run too, and :func:`tries` gives its larger number."""


def tries(day: int = 1, deep: int = 20) -> int:
    """How many examples of one claim to try."""
    return deep if DEEP else day


def seeds(day: int = 1, deep: int = 20) -> range:
    """The seeds of one claim: from 0."""
    return range(tries(day, deep))


def runs_on_two_devices(item: pytest.Item) -> bool:
    """Whether it is a test of the runtime, which runs on the CPU's device and on the adversarial one."""
    return Path(__file__).with_name("runtime") in item.path.parents and item.get_closest_marker("cpu_device") is None
