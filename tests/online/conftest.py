from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.online.caches import costs_are_known, empty_cache
from tests.online.runs import Run, run_plain
from tests.online.trainings import dropout_and_batch_norm


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("cache")):
        costs_are_known()
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """For each module."""


@pytest.fixture(scope="module")
def expected() -> Run:
    """The usual training as it is."""
    return run_plain(dropout_and_batch_norm)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the collector, by this package."""
    found = Counter[str]()

    def counted(name: str) -> None:
        inner = getattr(gc, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += sys._getframe(1).f_globals["__name__"].startswith("poochplan.")
            return inner(*args, **kwargs)

        monkeypatch.setattr(gc, name, call)

    counted("get_objects")
    counted("collect")
    return found
