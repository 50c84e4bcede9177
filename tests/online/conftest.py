from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.online.caches import costs_are_known, empty_cache


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("cache")):
        costs_are_known()
        yield


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Results are not to depend on how many compute threads there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
