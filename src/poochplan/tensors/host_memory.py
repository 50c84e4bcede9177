"""Host memory: the bytes that this process may still take, whether a step fits, and releasing dropped tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Literal

from poochplan.units import format_bytes

GIVEN_BACK_BYTES = 1 << 20
"""Smaller tensors stay in the heap: for a network of many small ones, fresh pages cost most of a step's time again."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB, _M_ARENA_MAX = -1, -3, -6, -8
_KEPT_BYTES = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
"""The final thresholds of glibc's own rule, in a process that has freed a block of 32 MiB, the largest that counts."""
_FIXED_BYTES = 128 << 10
"""Both thresholds if the environment has switched that rule off."""
_VARIABLES = {
    "mmap_threshold": "MALLOC_MMAP_THRESHOLD_",
    "trim_threshold": "MALLOC_TRIM_THRESHOLD_",
    "top_pad": "MALLOC_TOP_PAD_",
    "mmap_max": "MALLOC_MMAP_MAX_",
}
"""Tunables of glibc and their older names. Each of them switches its rule off."""
_ARENAS = "arena_max", "MALLOC_ARENA_MAX"
_MOST = (1 << 31) - 1

_lock = threading.RLock()  # reentrant, because a session may end in a finalizer, which can run anywhere
_open_blocks = 0
_FRESH_BYTES, _FAULT_TRIALS = 4 << 20, 5
MARGIN = 1.1
"""The in-core step must fit with a tenth to spare, because memory of allocators and threads belongs to no value."""


def available_bytes() -> int:
    """Host memory that this process may still take: of the machine, its cgroups, and its address space."""
    return available_and_limit()[0]


def available_and_limit() -> tuple[int, str]:
    """These bytes, and which limit leaves the fewest."""
    import resource  # not on Windows, where profiling is refused with its own message

    limits = [(_machine_bytes(), "the machine"), *((left, "its cgroup") for left in _cgroup_bytes())]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits.append((soft - pages * os.sysconf("SC_PAGE_SIZE"), "its address space (ulimit -v)"))
    left_bytes, limit = min(limits)
    return max(0, left_bytes), limit


def _machine_bytes() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_bytes() -> list[int]:
    """Bytes that are left in each limited cgroup of this process, version 1 or 2."""
    of_version = {False: ("memory.max", "memory.current"), True: _VERSION_1}
    return [left for at, is_first in _cgroups("memory") for left in _left(at, of_version[is_first])]


def io_limits() -> list[str]:
    """Limits of this process's cgroups on a disk's rate, as the kernel writes them."""
    found = []
    for at, is_first in _cgroups("blkio"):
        names = _VERSION_1_IO if is_first else ("io.max",)
        lines = [(name, line) for name in names for line in _lines(at / name)]
        found += [
            f"{line} ({name})" for name, line in lines if any(part.isdigit() for part in re.split("[ =]", line)[1:])
        ]
    return found


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """This process's cgroups with that controller, and those above them; and whether they are of version 1."""
    for line in _lines(_OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", controller):
            root = _CGROUPS / controllers
            folder = root / path.lstrip("/")
            yield from ((at, bool(controllers)) for at in (folder, *folder.parents) if at.is_relative_to(root))


_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_VERSION_1_IO = "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(folder: Path, names: tuple[str, str]) -> list[int]:
    limit, used = (" ".join(_lines(folder / name)) for name in names)
    if not (limit.isdigit() and used.isdigit()):  # no limit is "max", the root has no files
        return []
    inactive = [line.split()[1] for line in _lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return [int(limit) - int(used) + sum(map(int, inactive))]  # the inactive page cache can be dropped


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """In this block each tensor of 1 MiB or more is a separate mapping, which is released when it is freed.

    So every tensor has fresh pages, which takes up to half a step's time if tensors are large. Otherwise glibc would
    raise the threshold to the largest block ever freed, and keep such blocks in its heap (187 MiB of dropped 1-6 MiB
    tensors in one measurement).

    It applies to the whole process, until the last such block ends. Then both thresholds are those of the environment,
    or the final ones of glibc's own rule. The rule itself stays off, because any call of ``mallopt`` disables it.

    If the address space is limited (``ulimit -v``), threads that start in the block share the existing arenas: glibc
    would reserve 64 MiB of address space for each. It keeps this limit once a thread has met it.

    Without effect if the C library has no ``mallopt``.
    """
    _settle(1)
    try:
        yield
    finally:
        _settle(-1)


def is_freed_memory_given_back() -> bool:
    """Whether such a block is open, so that the process spends additional time on fresh pages."""
    return _open_blocks > 0


@contextlib.contextmanager
def new_memory_holds(byte: int) -> Iterator[None]:
    """In this block the C library fills new memory with ``byte``, below 255.

    Not so some blocks of about a kilobyte that the same thread has freed. Without effect if there is no ``mallopt``.
    """
    _call_libc("mallopt", _M_PERTURB, 0xFF ^ byte)  # it fills with the complement, and 0 disables filling
    try:
        yield
    finally:
        _call_libc("mallopt", _M_PERTURB, _asked(os.environ, "perturb", "MALLOC_PERTURB_") or 0)


def page_faults() -> int:
    """Number of fresh pages that the calling thread has been given; 0 if the system does not count them by thread."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt if hasattr(resource, "RUSAGE_THREAD") else 0


@functools.cache
def page_fault_s() -> float:
    """Seconds that a fresh page takes: its fault, and its return. Measured once, in some milliseconds; 0 if faults
    cannot be counted. The median counts, because other work makes either pass over the page longer.
    """
    return median(_page_fault_s() for _ in range(_FAULT_TRIALS))


def _page_fault_s() -> float:
    faults, times_s = page_faults(), [time.perf_counter()]  # a thread's own time lacks what a hypervisor takes
    with mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        place = ctypes.c_char.from_buffer(fresh)
        for _ in range(2):  # the second finds the pages there
            ctypes.memset(ctypes.addressof(place), 1, _FRESH_BYTES)
            times_s.append(time.perf_counter())
        faults = page_faults() - faults
        del place  # else the mapping could not be closed
    start_s, first_s, second_s = times_s
    return max(0.0, time.perf_counter() - start_s - 2 * (second_s - first_s)) / faults if faults else 0.0


def give_back_freed() -> None:
    """Releases the freed blocks that the C library has kept; without effect if the library has no call for it."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


def _settle(more: int) -> None:
    """Applies the setting of so many more open blocks. In one, memory that was freed before is released too."""
    global _open_blocks
    with _lock:
        _open_blocks += more
        for name, value in (_within() if _open_blocks else _afterwards(os.environ)).items():
            _call_libc("mallopt", name, min(value, _MOST))
        if _open_blocks:
            give_back_freed()


def _within() -> dict[int, int]:
    thresholds = dict.fromkeys(_KEPT_BYTES, GIVEN_BACK_BYTES)
    return thresholds | ({_M_ARENA_MAX: 1} if _address_space_is_limited() else {})


def _afterwards(environment: Mapping[str, str]) -> dict[int, int]:
    """The thresholds that glibc would use, as far as they can be determined."""
    asked = {name: _asked(environment, name, variable) for name, variable in _VARIABLES.items()}
    rule_is_off = any(value is not None for value in asked.values())
    kept = dict.fromkeys(_KEPT_BYTES, _FIXED_BYTES) if rule_is_off else dict(_KEPT_BYTES)
    for name, tunable in ((_M_MMAP_THRESHOLD, "mmap_threshold"), (_M_TRIM_THRESHOLD, "trim_threshold")):
        value = asked[tunable]
        kept[name] = kept[name] if value is None else value
    return kept | ({_M_ARENA_MAX: _asked(environment, *_ARENAS) or 0} if _address_space_is_limited() else {})


def _asked(environment: Mapping[str, str], tunable: str, variable: str) -> int | None:
    """The value in the environment, by either name; None if there is none that can be read."""
    tunables = dict(part.partition("=")[::2] for part in environment.get("GLIBC_TUNABLES", "").split(":"))
    text = tunables.get(f"glibc.malloc.{tunable}", environment.get(variable, ""))
    try:
        return int(text, 0)
    except ValueError:
        return None


def _address_space_is_limited() -> bool:
    import resource  # not on every system that can plan

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def fitting_mode(needed_bytes: int, free_bytes: int) -> tuple[Literal["run", "swap-all"], str]:
    """``run`` or ``swap-all`` for a step that takes ``needed_bytes`` beside the present memory, and why."""
    mode: Literal["run", "swap-all"] = "run" if needed_bytes * MARGIN <= free_bytes else "swap-all"
    verb = "fits" if mode == "run" else "does not fit"
    return mode, (
        f"mode auto chose {mode}: in-core the step {verb}. Beside model and data it needs {format_bytes(needed_bytes)} "
        f"and a tenth to spare; {format_bytes(free_bytes)} are free"
    )
