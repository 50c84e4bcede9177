"""The compiled allocator for Python: loaded and installed once for a process, and never unloaded.

Its functions are short and never wait for Python. So they are called with the interpreter's lock held, which is faster
than releasing it, and cannot deadlock.

It is built once for each torch, with c10's headers, which are part of torch. In a session on the CPU freed memory goes
back to the system, and large blocks request huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from poochplan.errors import AllocatorError, NativeError
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES
from poochplan.native import NativeBuild, Signatures
from poochplan.tensors.host_memory import freed_memory_given_back

_HANDLE, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: Signatures = {
    "install": (_INT, ()),
    "live_blocks": (_INT64, ()),
    "next_block": (_INT64, ()),
    "block_at": (_INT64, (_HANDLE,)),
    "is_served": (_INT, (_HANDLE,)),
    "scope_new": (_HANDLE, ()),
    "scope_join": (_HANDLE, (_HANDLE,)),
    "set_aside": (None, (_INT,)),
    "want_huge_pages": (None, (_INT,)),
    "count_begin": (None, (_HANDLE, _INT64)),
    "count_of": (_INT64, (_HANDLE, _INT)),
    "count_reset_most": (None, (_HANDLE,)),
    "count_end": (None, (_HANDLE,)),
    "record_begin": (None, (_HANDLE,)),
    "record_mark": (None, (_HANDLE, _INT64)),
    "record_end": (_INT64, (_HANDLE,)),
    "record_take": (None, (_HANDLE, _HANDLE, _INT64)),
    "arena_new": (_HANDLE, (_INT64,)),
    "arena_lay_out": (_INT, (_HANDLE, _INT64, _HANDLE, _HANDLE, _HANDLE, _INT64, _INT64)),
    "arena_begin": (_INT, (_HANDLE, _INT64)),
    "arena_at": (None, (_HANDLE, _INT64)),
    "arena_fill_gaps": (None, (_HANDLE,)),
    "arena_note": (_INT64, (_HANDLE, _HANDLE)),
    "arena_again": (_HANDLE, (_HANDLE, _INT64, _INT64)),
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
BIRTH, DEATH, MARK = 0, 1, 2
EVENT = np.dtype([("kind", np.int64), ("block", np.int64), ("size_bytes", np.int64), ("value", np.int64)])
"""One event. ``kind`` is BIRTH, DEATH or MARK; ``block`` a number in order of birth (-1 for a mark); ``size_bytes`` the
requested bytes, not rounded. ``value`` is the mark's value; for a birth 1 in an arena; for a death 1 on a thread
outside the scope."""

LIFETIME = np.dtype([("size_bytes", np.int64), ("point", np.int64), ("birth", np.int64), ("death", np.int64)])
"""One block that was allocated in a log: ``point`` is the value of the last mark before (0 before any), ``birth`` and
``death`` are indices of events. ``death`` is -1 if the block outlived the log."""

Table = npt.NDArray[Any]


class Library:
    """The functions of the compiled allocator; handles are addresses, which stay valid for the whole process."""

    def __init__(self) -> None:
        loader = functools.partial(ctypes.PyDLL, mode=os.RTLD_NOW | os.RTLD_NODELETE)
        vars(self).update(ALLOCATOR.load(loader, _SIGNATURES))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


_lock = threading.Lock()
_library: Library | None = None
_failure: str | None = None


def library() -> Library:
    """The installed library. The first call builds and loads it, and installs it in front of torch's own allocator.

    Earlier tensors keep their allocator, also when they are resized. After a failure no later call tries again.

    Raises ``AllocatorError``, which says what to do, if it cannot be built or loaded, or another is in front of it.
    """
    global _library, _failure
    with _lock:
        if _failure is not None:
            raise AllocatorError(_failure)
        if _library is None:
            try:
                _library = _installed()
            except (NativeError, OSError) as error:
                _failure = str(error)
                raise AllocatorError(_failure) from None
        return _library


def is_loaded() -> bool:
    """Whether the library is installed in this process."""
    return _library is not None


def why_not_loaded() -> str:
    """Loads it, which builds it if necessary. Says why that is impossible, and what to do, in one line; else empty."""
    try:
        library()
    except AllocatorError as error:
        return str(error)
    return ""


def why_unavailable() -> str:
    """Why there is no library in this process and can be none, and what to do, in one line; else empty. It builds
    nothing, so a compiler that fails is known once :func:`library` was called.
    """
    return _failure or ("" if is_loaded() else ALLOCATOR.why_unavailable())


def untold_absence() -> str:
    """One line for the user if :func:`library` has failed, or can only fail: why, the cost, what to do. Empty
    otherwise, and after the first such line.
    """
    return ALLOCATOR.untold(why_unavailable())


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # another thread may hold it at the fork


def _installed() -> Library:
    found = Library()
    code = found.install()
    if code:
        raise AllocatorError(
            f"the arena's allocator could not be installed: {_REFUSALS[code]}; run without other allocators"
        )
    return found


class TorchBuild(NativeBuild):
    """Builds with torch's settings, headers and ``libraries``, which are found by name, as torch has loaded them: any
    environment may share what is built.
    """

    def __init__(self, name: str, sources: Path, without: str, libraries: tuple[str, ...]) -> None:
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        super().__init__(name, sources, ("-std=c++20", abi), without)
        self.libraries = libraries

    def facts(self) -> tuple[str, ...]:
        return f"torch-{torch.__version__}", str(torch.version.git_version)

    def options(self) -> list[str]:
        if not sys.platform.startswith("linux"):
            raise NativeError(f"expected Linux for the compiled {self.name}, found {sys.platform}; use it there")
        folder = Path(torch.__file__).parent
        for part in ("include/c10/core/Allocator.h", *(f"lib/lib{library}.so" for library in self.libraries)):
            if not (folder / part).exists():
                raise NativeError(
                    f"expected {part} in {folder}, found none; install torch from its wheel, which has it"
                )
        linked = (f"-l{library}" for library in self.libraries)
        return ["-isystem", str(folder / "include"), f"-L{folder / 'lib'}", *linked, "-pthread"]


ALLOCATOR = TorchBuild(
    "allocator",
    Path(__file__).parent / "native",
    "budgets cover live tensors and not the memory inside ops, and steps have no arena",
    ("c10",),
)
library_file, is_built, build = ALLOCATOR.file, ALLOCATOR.is_built, ALLOCATOR.build
compiler_name = ALLOCATOR.compiler_name


@contextlib.contextmanager
def fresh_memory() -> Iterator[None]:
    """A block in which dropped tensors leave resident memory (:func:`freed_memory_given_back`), for the whole process.

    Each tensor of some megabytes is then fresh memory, which takes up to half a step's time in small pages. So the
    compiled allocator, if installed, requests huge pages, unless the kernel's setting is ``never``.
    """
    found = _library
    with freed_memory_given_back():
        if found is not None:
            found.want_huge_pages(1)
        try:
            yield
        finally:
            if found is not None:
                found.want_huge_pages(-1)


class ThreadScope:
    """A set of threads. A block belongs to the scope of the thread that allocated it; any thread may free it.

    A thread is in one scope at a time, or in none. Its state is in the library and never freed, so make few of them.
    Raises the errors of :func:`library`.

    It has one count at a time: the signed bytes of its live blocks since :meth:`begin_count`, each rounded up to the
    allocation unit. Births on threads of the scope count. Deaths count on any thread, for the scope's blocks and for
    blocks that the beginning thread had allocated before; the latter make the count negative. Allocations of other
    threads never count. Nor does a block from before the allocator was loaded.
    """

    def __init__(self) -> None:
        self.library: Library = library()
        handle = self.library.scope_new()
        if handle is None:
            raise AllocatorError("out of memory where a step is metered; free some")
        self.handle: int = handle

    def join(self) -> None:
        """Blocks that this thread allocates from now on belong to the scope."""
        self.library.scope_join(self.handle)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """A block in which this thread belongs to the scope; afterwards to its earlier one."""
        before = self.library.scope_join(self.handle)
        try:
            yield
        finally:
            self.library.scope_join(before)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block for work outside the step: this thread's allocations belong to no scope and no arena."""
        before = self.library.scope_join(None)
        self.library.set_aside(1)
        try:
            yield
        finally:
            self.library.set_aside(-1)
            self.library.scope_join(before)

    def begin_count(self) -> None:
        """Counts from 0."""
        self.library.count_begin(self.handle, ALLOCATION_UNIT_BYTES)

    def end_count(self) -> None:
        """Stops the count; the results can still be read."""
        self.library.count_end(self.handle)

    def reset_peak(self) -> None:
        """Both peaks restart at the present live bytes."""
        self.library.count_reset_most(self.handle)

    @property
    def live_bytes(self) -> int:
        """Bytes live now minus those at the beginning."""
        return self.library.count_of(self.handle, 0)

    @property
    def peak_bytes(self) -> int:
        """Most live bytes at any time since the beginning, or since :meth:`reset_peak`; at least 0 after it begins."""
        return self.library.count_of(self.handle, 1)

    @property
    def outside_live_bytes(self) -> int:
        """Like :attr:`live_bytes`, for blocks that lie in no arena."""
        return self.library.count_of(self.handle, 2)

    @property
    def outside_peak_bytes(self) -> int:
        """Like :attr:`peak_bytes`, for blocks that lie in no arena."""
        return self.library.count_of(self.handle, 3)


class AllocationLog:
    """A block that logs the calling thread's allocations, and when they are freed on any thread. The thread joins the
    scope for it. Other threads of the scope may run other steps.

    State: open, or closed with its :attr:`events`. A scope has one log at a time.
    """

    def __init__(self, scope: ThreadScope) -> None:
        self._scope = scope
        self._library, self._handle = scope.library, scope.handle
        self._joined = scope.joined()
        self.events: Table = np.empty(0, EVENT)
        """Of type :data:`EVENT`, in order, once the block has ended."""

    def __enter__(self) -> AllocationLog:
        self._library.record_begin(self._handle)
        self._joined.__enter__()
        return self

    def mark(self, value: int) -> None:
        self._library.record_mark(self._handle, value)

    def __exit__(self, *_: object) -> None:
        self._joined.__exit__(None, None, None)
        count = self._library.record_end(self._handle)
        if count < 0:
            raise AllocatorError("expected memory for the log of allocations, found too little; log a shorter stretch")
        self.events = np.empty(count, EVENT)
        self._library.record_take(self._handle, self.events.ctypes.data, count)


def lifetimes(events: Table, smallest_bytes: int = 0) -> Table:
    """The blocks of at least ``smallest_bytes`` allocated in a log, in order of birth, of type :data:`LIFETIME`."""
    kind, block = events["kind"], events["block"]
    births = np.flatnonzero((kind == BIRTH) & (events["size_bytes"] >= smallest_bytes))
    deaths = np.flatnonzero(kind == DEATH)
    marks = np.flatnonzero(kind == MARK)
    found = np.empty(len(births), LIFETIME)
    found["size_bytes"], found["birth"] = events["size_bytes"][births], births
    before = np.searchsorted(marks, births)
    values = np.concatenate([np.zeros(1, np.int64), events["value"][marks]])
    found["point"] = values[before]
    found["death"] = -1
    order = deaths[np.argsort(block[deaths], kind="stable")]
    place = np.searchsorted(block[order], block[births])
    died = place < len(order)
    died[died] = block[order[place[died]]] == block[births[died]]
    found["death"][died] = order[place[died]]
    return found
