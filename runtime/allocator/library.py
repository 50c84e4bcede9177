"""The compiled allocator as Python sees it: loaded and put in force once for a process, and never unloaded.

Its functions are short and never wait for Python, so they are called with the interpreter's lock held: that is faster
than letting it go, and cannot deadlock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poochplan.errors import AllocatorError, NativeError

from .building import build

_HANDLE, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "install": (_INT, ()),
    "is_in_force": (_INT, ()),
    "live_blocks": (_INT64, ()),
    "next_block": (_INT64, ()),
    "block_at": (_INT64, (_HANDLE,)),
    "is_served": (_INT, (_HANDLE,)),
    "scope_new": (_HANDLE, ()),
    "scope_join": (_HANDLE, (_HANDLE,)),
    "set_aside": (None, (_INT,)),
    "want_huge_pages": (None, (_INT,)),
    "count_begin": (_INT, (_HANDLE, _INT64)),
    "count_live": (_INT64, (_HANDLE,)),
    "count_most": (_INT64, (_HANDLE,)),
    "count_outside": (_INT64, (_HANDLE,)),
    "count_outside_most": (_INT64, (_HANDLE,)),
    "count_reset_most": (None, (_HANDLE,)),
    "count_mark": (_INT64, (_HANDLE,)),
    "count_end": (None, (_HANDLE,)),
    "record_begin": (_INT, (_HANDLE,)),
    "record_mark": (None, (_HANDLE, _INT64)),
    "record_end": (_INT64, (_HANDLE,)),
    "record_take": (None, (_HANDLE, _HANDLE, _INT64)),
    "arena_new": (_HANDLE, (_INT64, _HANDLE, _HANDLE, _HANDLE, _INT64, _INT64)),
    "arena_lay_out": (_INT, (_HANDLE, _INT64, _HANDLE, _HANDLE, _HANDLE, _INT64, _INT64)),
    "arena_begin": (_INT, (_HANDLE, _INT64)),
    "arena_join": (_INT, (_HANDLE,)),
    "arena_leave": (None, (_HANDLE,)),
    "arena_at": (None, (_HANDLE, _INT64)),
    "arena_end": (None, (_HANDLE,)),
    "arena_drop": (None, (_HANDLE,)),
    "arena_counts": (None, (_HANDLE, _HANDLE)),
    "arena_misses": (_INT64, (_HANDLE, _HANDLE, _INT64)),
    "arena_live_blocks": (_INT64, (_HANDLE,)),
    "arena_resident_bytes": (_INT64, (_HANDLE,)),
    "arenas_mapped": (_INT64, ()),
}
"""Result and arguments of each function of ``native/allocator.cpp``, without the ``pooch_`` of its name there."""

_REFUSALS = {
    1: "the allocator in force has no deleter of its own, as another library's may have none",
    2: "another allocator has a higher priority",
    3: "torch refused it",
}


class Library:
    """The functions of the compiled allocator; handles are addresses, which stay valid for the whole process."""

    install: Callable[[], int]
    is_in_force: Callable[[], int]
    live_blocks: Callable[[], int]
    next_block: Callable[[], int]
    block_at: Callable[[int], int]
    is_served: Callable[[int], int]
    scope_new: Callable[[], int | None]
    scope_join: Callable[[int | None], int | None]
    set_aside: Callable[[int], None]
    want_huge_pages: Callable[[int], None]
    count_begin: Callable[[int, int], int]
    count_live: Callable[[int], int]
    count_most: Callable[[int], int]
    count_outside: Callable[[int], int]
    count_outside_most: Callable[[int], int]
    count_reset_most: Callable[[int], None]
    count_mark: Callable[[int], int]
    count_end: Callable[[int], None]
    record_begin: Callable[[int], int]
    record_mark: Callable[[int, int], None]
    record_end: Callable[[int], int]
    record_take: Callable[[int, int, int], None]
    arena_new: Callable[[int, int, int, int, int, int], int | None]
    arena_lay_out: Callable[[int, int, int, int, int, int, int], int]
    arena_begin: Callable[[int, int], int]
    arena_join: Callable[[int], int]
    arena_leave: Callable[[int], None]
    arena_at: Callable[[int, int], None]
    arena_end: Callable[[int], None]
    arena_drop: Callable[[int], None]
    arena_counts: Callable[[int, int], None]
    arena_misses: Callable[[int, int, int], int]
    arena_live_blocks: Callable[[int], int]
    arena_resident_bytes: Callable[[int], int]
    arenas_mapped: Callable[[], int]

    def __init__(self, file: Path) -> None:
        try:
            loaded = ctypes.PyDLL(str(file), mode=os.RTLD_NOW | os.RTLD_NODELETE)
        except OSError as error:
            line = " ".join(str(error).split())
            raise AllocatorError(f"{file}: cannot be loaded ({line}); remove it, and it is built anew") from None
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"pooch_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


_lock = threading.Lock()
_library: Library | None = None
_failure: str | None = None


def library() -> Library:
    """The library in force: built, loaded and put before torch's own allocator at the first call.

    Tensors that were made before keep the allocator they have, also where they are resized. A failure is remembered,
    so that no later call tries again.

    Raises
    ------
    AllocatorError
        It cannot be built or loaded, or another allocator stands before it; one line says what to do.
    """
    global _library, _failure
    with _lock:
        if _failure is not None:
            raise AllocatorError(_failure)
        if _library is None:
            try:
                _library = _installed(build())
            except NativeError as error:
                _failure = str(error)
                raise AllocatorError(_failure) from None
        return _library


def is_loaded() -> bool:
    """Whether the library is in force in this process, or was found not to be possible."""
    return _library is not None or _failure is not None


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # another thread may have held it


def _installed(file: Path) -> Library:
    found = Library(file)
    code = found.install()
    if code:
        raise AllocatorError(
            f"expected to stand before torch's CPU allocator, but {_REFUSALS[code]}; nothing is served"
        )
    return found
