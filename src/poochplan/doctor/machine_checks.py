"""Checks of the machine: processor and threads, memory and its pages, the spill disk, and how steady its clock is."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from poochplan.errors import SpillError
from poochplan.profiler.assembly.host import this_host
from poochplan.runtime.devices.spill import SpillFile, choose_spill_dir, file_system_type
from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes, format_rate

from .finding import Finding, Status, judged

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBE_BYTES = 64 << 20
LEAST_FREE_BYTES = 4 << 30
ROUNDS, ROUND_S = 30, 0.005
MUCH_SPREAD = 0.2
"""Share of its median by which the same work may spread before times of short steps say little."""


def machine_findings(spill_dir: str | Path | None) -> Iterator[Finding]:
    """All of them, in the order in which a person asks; the spill disk is written to, for a fraction of a second."""
    yield system()
    yield threads(torch.get_num_threads(), _usable_cores())
    yield Finding(name="memory", status=Status.OK, found=f"{format_bytes(available_bytes())} free for this process")
    yield huge_pages(_read(HUGE_PAGES))
    yield spill_disk(spill_dir)
    yield noise(_rounds_s())


def system() -> Finding:
    """Profiling and running need Linux."""
    host = this_host()
    found = f"{host.system}, {host.processor}"
    if sys.platform.startswith("linux"):
        return Finding(name="system", status=Status.OK, found=found)
    return Finding(
        name="system", status=Status.MISSING, found=found, advice="profile and run on Linux; plans can be made here"
    )


def threads(used: int, cores: int) -> Finding:
    """Torch's threads against the cores that this process may use."""
    advice = f"set OMP_NUM_THREADS={cores}: threads that wait for each other slow every op"
    return judged("threads", used <= cores, f"torch computes with {used}, this process may use {cores} cores", advice)


def huge_pages(setting: str) -> Finding:
    """Of the kernel: in a session each tensor of 64 KiB or more is fresh memory, which small pages make dear.

    ``setting`` is the kernel's line, with the chosen word in brackets; empty where it tells none.
    """
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen == "always":
        return Finding(name="huge pages", status=Status.OK, found="always")
    if chosen == "madvise":
        return Finding(
            name="huge pages",
            status=Status.OK,
            found="where a program asks, as the compiled allocator does",
        )
    return Finding(
        name="huge pages",
        status=Status.WARNING,
        found=chosen or "the kernel does not tell",
        advice=f"echo madvise | sudo tee {HUGE_PAGES}; without them fresh memory takes up to half of a step on the CPU",
    )


def spill_disk(spill_dir: str | Path | None) -> Finding:
    """Where values are swapped to on the CPU, what is free there, and how fast it takes and gives 64 MiB."""
    try:
        where = choose_spill_dir(spill_dir)
        free_bytes = shutil.disk_usage(where).free
        out_s, in_s = _copy_seconds(where, min(PROBE_BYTES, free_bytes // 2))
    except (SpillError, OSError) as error:
        return Finding(
            name="spill disk",
            status=Status.MISSING,
            found=" ".join(str(error).split()),
            advice="name a folder on a disk by --spill-dir or POOCH_SPILL_DIR; nothing is swapped on the CPU without",
        )
    size_bytes = min(PROBE_BYTES, free_bytes // 2)
    found = (
        f"{where} ({file_system_type(where) or 'unknown'}), {format_bytes(free_bytes)} free, out "
        f"{format_rate(size_bytes / out_s)}, in {format_rate(size_bytes / in_s)} ({format_bytes(size_bytes)}, page "
        "cache included)"
    )
    return judged("spill disk", free_bytes >= LEAST_FREE_BYTES, found, "make room there, or name another --spill-dir")


def noise(rounds_s: list[float]) -> Finding:
    """How far the same work spreads over rounds: seconds of each."""
    low_s, middle_s, high_s = np.percentile(rounds_s, [25, 50, 75])
    spread, worst = (high_s - low_s) / middle_s, max(rounds_s) / middle_s
    found = f"the same work spreads by {spread:.0%} (quartiles), at worst {worst:.1f} times as long"
    advice = "profile when nothing else runs, or with more --iterations: times of a busy machine make poor plans"
    return judged("noise", bool(spread <= MUCH_SPREAD), found, advice)


def _rounds_s() -> list[float]:
    """Seconds of some rounds of one matrix product, repeated to take about 5 ms."""
    factors = torch.ones(256, 256)
    repeats, took_s = 1, 0.0
    while took_s < ROUND_S:
        repeats *= 2
        took_s = _products_s(factors, repeats)
    return [_products_s(factors, repeats) for _ in range(ROUNDS)]


def _products_s(factors: torch.Tensor, repeats: int) -> float:
    start_s = time.perf_counter()
    for _ in range(repeats):
        torch.mm(factors, factors)
    return time.perf_counter() - start_s


def _copy_seconds(where: Path, size_bytes: int) -> tuple[float, float]:
    """Out and back in, of a spill file that has been written once."""
    file = SpillFile(where)
    try:
        file.write_ahead(size_bytes)
        buffer = bytearray(size_bytes)
        start_s = time.perf_counter()
        moved = 0
        while moved < size_bytes:
            moved += os.pwrite(file.descriptor, memoryview(buffer)[moved:], moved)
        between_s = time.perf_counter()
        moved = 0
        while moved < size_bytes:
            moved += os.preadv(file.descriptor, [memoryview(buffer)[moved:]], moved)
        return between_s - start_s, time.perf_counter() - between_s
    finally:
        file.close()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
