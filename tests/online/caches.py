"""The user's cache folder for tests of ``auto``: empty, but for what is compiled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poochplan.planner.evaluator.evaluator_library import EVALUATOR, library


@contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Within the block caches lie in ``folder``: what is measured is measured once for all of the block."""
    native = EVALUATOR.file().parent
    if library(None) is not None and native.is_dir():
        (folder / "poochplan" / "native").mkdir(mode=0o700, parents=True)
        shutil.copytree(native, folder / "poochplan" / "native" / native.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield
