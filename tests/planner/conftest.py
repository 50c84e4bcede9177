from __future__ import annotations

import pytest

from poochplan.planner.simulator import evaluator


@pytest.fixture(scope="session")
def compiled_evaluator() -> None:
    """For what there is only with the compiled evaluator: searches of packings, and its own figures."""
    if evaluator.library(None) is None:
        pytest.skip(evaluator._loading.failure)
