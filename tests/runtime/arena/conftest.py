"""The library is built once for a session of tests, apart from the user's own; without a compiler they are left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poochplan.runtime.arena.library import Library, ThreadScope, build, library, why_unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test here is about a device: once is enough."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cpu_device)


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for the user's cache; processes that run tests beside each other share it."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"


@pytest.fixture(scope="session")
def native(cache_home: Path) -> Library:
    """The library, in force in this process from here on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        reason = why_unavailable()
        if reason:
            pytest.skip(reason)
        build()  # also where another test has loaded one from elsewhere
        return library()


@pytest.fixture
def scope(native: Library) -> ThreadScope:
    return ThreadScope()
