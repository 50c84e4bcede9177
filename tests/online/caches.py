"""The user's cache folder for tests of ``auto``: empty, but for the evaluator, which takes long to compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poochplan.formats.files import cache_folder


@contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Within the block caches lie in ``folder``: what is measured is measured once for all of the block."""
    compiled = cache_folder() / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "poochplan").mkdir()
    (folder / "poochplan" / "compiled").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield
