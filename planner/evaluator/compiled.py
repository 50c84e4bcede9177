"""The decorator ``compiled``: machine code by numba where that is installed, plain Python where it is not.

Machine code is kept in the user's cache folder. numba alone would ask only whether a function's own file has changed,
not the files of what it calls. So the folder's name has a hash of them all: sources of this folder and of the
function's own, numba's version and Python's. A changed source leads to another folder, and is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from poochplan.formats.files import cache_folder

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable[..., Any])

HERE = Path(__file__).parent


def _numba() -> Any:
    """numba, or None: everything works without, at the speed of plain Python."""
    try:
        import numba
    except (ImportError, OSError, MemoryError):  # the latter two where address space is limited
        return None
    return numba


NUMBA = _numba()


def is_compiled() -> bool:
    """Whether ``compiled`` compiles."""
    return NUMBA is not None and not NUMBA.config.DISABLE_JIT


def compiled(function: Function) -> Function:
    """Machine code that other threads run beside; sums in the order in which they are written."""
    if not is_compiled():
        return function
    folder = folder_of(Path(function.__code__.co_filename).parent)
    before = NUMBA.config.CACHE_DIR
    if folder is not None:
        NUMBA.config.CACHE_DIR = str(folder)  # read while numba decorates, and then no more
    try:
        made: Function = NUMBA.njit(nogil=True, cache=folder is not None, error_model="numpy", no_cfunc_wrapper=True)(
            function
        )
    finally:
        NUMBA.config.CACHE_DIR = before
    return made


def part(function: Function) -> Function:
    """The same for what only compiled code calls: without a way in from Python, and without counts of references.

    It must allocate nothing. It has no file in the cache: it is in those of its callers.
    """
    if not is_compiled():
        return function
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    made: Function = NUMBA.njit(nogil=True, error_model="numpy", **options)(function)
    return made


@functools.cache
def folder_of(sources: Path) -> Path | None:
    """Where code of functions in ``sources`` is kept; None where nothing can be written."""
    try:
        folder = cache_folder() / "compiled" / stamp(sources)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Of several processes that compile the same at once, one does, and the others load what it has written."""
    folder = folder_of(HERE) if is_compiled() and fcntl is not None else None
    if folder is None:
        yield
        return
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stamp(sources: Path) -> str:
    """What machine code depends on, as 16 hexadecimal digits."""
    hashed = hashlib.sha256(f"{NUMBA.__version__ if NUMBA else ''} {sys.version}".encode())
    for folder in sorted({HERE, sources}):
        for path in sorted(folder.glob("*.py")):
            hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]
