"""How much the suite tries: each claim once by day, every seed and every network when POOCH_DEEP is set."""

from __future__ import annotations

import os

DEEP = os.environ.get("POOCH_DEEP", "") not in ("", "0")
"""``make test-deep``: the tests marked ``deep`` run too, and :func:`tries` gives its larger number."""


def tries(day: int = 1, deep: int = 20) -> int:
    """How many examples of one claim to try."""
    return deep if DEEP else day


def seeds(day: int = 1, deep: int = 20) -> range:
    """The seeds of one claim: from 0."""
    return range(tries(day, deep))
