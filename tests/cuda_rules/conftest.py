"""The stand-in for a GPU that most modules run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda_rules.machine import Machine, on_stand_in


@pytest.fixture
def gpu() -> Iterator[Machine]:
    """A machine of which no rule is broken."""
    with on_stand_in() as machine:
        yield machine
        assert machine.violations == []
