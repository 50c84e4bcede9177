"""The user's cache folder for tests of ``auto``: empty, but for what is compiled."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poochplan.errors import NativeError
from poochplan.planner.simulator.evaluator import EVALUATOR, library
from poochplan.runtime.arena.library import ALLOCATOR


@contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Within the block caches lie in ``folder``: what is measured is measured once for all of the block."""
    (folder / "poochplan" / "native").mkdir(mode=0o700, parents=True)
    for built in (EVALUATOR.file().parent if library(None) is not None else None, _allocator()):
        if built is not None and built.is_dir():
            shutil.copytree(built, folder / "poochplan" / "native" / built.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


def _allocator() -> Path | None:
    """Where it is built; None where it cannot be."""
    with contextlib.suppress(NativeError):
        return ALLOCATOR.build().parent
    return None
