"""The compiled evaluator as Python sees it: built in the background, loaded once for a process, in nobody's way."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from poochplan.errors import NativeError
from poochplan.native.native_build import NativeBuild
from poochplan.planner.problem.arrays import Ints

EVALUATOR: Final = NativeBuild(
    "evaluator", Path(__file__).parent / "native", ("-std=c++17", "-ffp-contract=off")
)  # sums in the order in which they are written
_HANDLE, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "evaluator_new": (_HANDLE, (_HANDLE, _INT64)),
    "evaluator_drop": (None, (_HANDLE,)),
    "evaluate": (None, (_HANDLE, _HANDLE, _INT64, _INT64, _HANDLE, _HANDLE)),
    "memory": (None, (_HANDLE, _HANDLE)),
    "score": (_DOUBLE, (_HANDLE, _HANDLE, _INT64, _HANDLE)),
    "walk_on": (_INT64, (_HANDLE, _HANDLE, _HANDLE, _HANDLE, _INT64, _DOUBLE, _HANDLE)),
    "sweep": (_INT64, (_HANDLE, _HANDLE, _HANDLE, _HANDLE, _HANDLE)),
    "first_fit": (None, (_HANDLE, _HANDLE, _INT64, _HANDLE)),
    "place_all": (_INT64, (_HANDLE, _INT64, _HANDLE, _INT64, _HANDLE, _INT64, _HANDLE)),
}
"""Result and arguments of each function of ``native/evaluator.cpp``, without the ``pooch_`` of its name there."""


class _Loading:
    """State: the library of this process, once its build has ended; or why there is none."""

    def __init__(self) -> None:
        self.found: Any = None
        self.failure = ""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, wait_s: float | None) -> None:
        """Begins, where that was not done; a library that is built already is there at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="evaluator's build")
                try:
                    self._thread.start()
                except RuntimeError as error:  # where address space is limited
                    self.failure = str(error)
                wait_s = None if EVALUATOR.is_built() else wait_s
        if not self.failure:
            self._thread.join(wait_s)

    def _load(self) -> None:
        try:
            loaded = ctypes.CDLL(str(EVALUATOR.build()))
            functions = {name: getattr(loaded, f"pooch_{name}") for name in _SIGNATURES}
            for name, (result, arguments) in _SIGNATURES.items():
                functions[name].restype, functions[name].argtypes = result, arguments
            self.found = SimpleNamespace(**functions)
        except (NativeError, OSError, AttributeError) as error:
            self.failure = str(error) or repr(error)


_loading = _Loading()


def begin_build() -> None:
    """Has the library built and loaded in the background, where it is not there; nothing is said where it cannot be."""
    library()


def library(wait_s: float | None = 0.0) -> Any:
    """The library's functions, after waiting so long for it (None: however long it takes); None where it is not there.

    It begins to be built at the first call. Arrays go in by their addresses (:func:`address`, :func:`addresses`), and
    other threads run beside what is called.
    """
    if _loading.found is None and not _loading.failure:
        _loading.wait(wait_s)
    return _loading.found


def address(array: np.ndarray[Any, Any]) -> int:
    """Of an array's first element."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def addresses(arrays: Iterable[np.ndarray[Any, Any]]) -> Ints:
    """A struct of ``Rows``: of each array the address and how many rows it has. It keeps none of them alive."""
    return np.array([word for array in arrays for word in (address(array), len(array))], dtype=np.int64)
