"""Host memory: how much of it this process may still take."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Host memory that this process may still take: of the machine, its cgroups, and its address space."""
    import resource  # not on Windows, where profiling is refused with a line of its own

    limits = [_machine_bytes(), *_cgroup_bytes()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits.append(soft - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(limits))


def _machine_bytes() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_bytes() -> list[int]:
    """What each limited cgroup of this process, version 1 or 2, has left."""
    left = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup") / controllers
            names = ("memory.max", "memory.current") if not controllers else _VERSION_1
            folder = root / path.lstrip("/")
            left += [found for at in (folder, *folder.parents) if at.is_relative_to(root) for found in _left(at, names)]
    return left


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(folder: Path, names: tuple[str, str]) -> list[int]:
    limit, used = (" ".join(_lines(folder / name)) for name in names)
    if not (limit.isdigit() and used.isdigit()):  # no limit is "max", the root has no files
        return []
    inactive = [line.split()[1] for line in _lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return [int(limit) - int(used) + sum(map(int, inactive))]  # a page cache that would give way


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
