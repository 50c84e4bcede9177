from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Helpers of the tests are imported by their plain names, from wherever pytest was started.
for folder in (".", "runtime", "planner"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() and os.environ.get("POOCH_GPU_TESTS_DEVICE") != "cpu":
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords hold the names of folders too
                item.add_marker(skip)
