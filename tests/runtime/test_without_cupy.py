"""CuPy that is installed and cannot be used is told once; where there is none, nothing is."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from poochplan.runtime.devices import pinned

pytestmark = pytest.mark.cpu_device
BROKEN = {
    "a library is missing": "raise ImportError('libcuda.so.1: cannot open shared object file')",
    "a part is missing": "import no_such_part",
    "no runtime answers": """
class cuda:
    class runtime:
        @staticmethod
        def runtimeGetVersion():
            raise RuntimeError("cudaErrorInsufficientDriver")
""",
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy.py").write_text(BROKEN[request.param])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", None)  # what is noted here is taken away again, import or not
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(pinned, "_is_told", False)


@pytest.mark.usefixtures("broken")
def test_an_installation_that_fails_is_one_line() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"CuPy is installed and cannot be used \(.+\): going on without it"
    ) as told:
        assert [pinned.cupy_or_none() for _ in range(3)] == [None] * 3
    assert len(told) == 1


def test_none_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned.cupy_or_none() is None
