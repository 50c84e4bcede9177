"""The link: seconds per copy at several sizes, in both directions and together, and how much copies slow compute.

A direction is planned with a line, ``latency + bytes / bandwidth``, fitted to its curve: the one with the smallest
largest relative error over the sizes of real values (the ordinary Chebyshev fit). If no line follows the curve, it may
not be much too fast for large copies, which carry the bytes (docs/planner.md).

Measurements are stored per machine in the user's cache folder; a wrong entry there is no error.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from poochplan.errors import SpillError
from poochplan.formats.files import cache_folder, encode_readable, not_kept, read_cache, write_cache
from poochplan.formats.occupancy import Floats
from poochplan.formats.profile import Link, LinkDirection
from poochplan.profiler.capture.clock import clock_of
from poochplan.runtime.devices.accelerator import QueueStream
from poochplan.runtime.devices.backend import backend_of, memory_left
from poochplan.runtime.devices.cpu import choose_spill_dir, file_system_type
from poochplan.runtime.devices.device import ComputeDevice, Stream
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from poochplan.runtime.messages import warn_once
from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes, format_seconds

SIZES_BYTES = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
DEVICE_SIZES_BYTES = (*SIZES_BYTES, 256 << 20)
CURVE_SIZES_BYTES = tuple(4**power << 16 for power in range(8))
"""64 KiB to 1 GiB, for a full curve."""
LARGEST_PAGEABLE_BYTES = 256 << 20
"""Copies of pageable memory are measured up to this size, for comparison only: the runtime's copies are pinned."""
CPU_PROBE, DEVICE_PROBE = (512, 4 << 20), (4096, 64 << 20)
"""The work computed beside copies: the side of two square matrices, and how many numbers are clamped."""
_REPEATS = 5
_PROBED_S = 0.02
"""For so long an op is called, again and again, to time it."""
_LONGEST_FIRST_WRITE_S = 5.0
Curve = list[tuple[int, float]]
Least = Callable[[int], int]
Begin = Callable[[], object]
"""Called before each timed run. It returns when the device has no work left, and when all ranks have called it."""
SMALL_BYTES = 1 << 20
"""Copies from this size on count in full, shorter ones by their share of it: they carry few bytes."""
LARGE_BYTES = 64 << 20
"""Saved values of real steps are mostly not larger."""
LEAST_SHARE_LARGE, LEAST_SHARE_LARGEST = 0.8, 0.5
"""Least share of the measured seconds that the line gives at the largest size up to LARGE_BYTES, and at the largest."""
_SLOPE_FLOOR = 1e-3
"""Least share of the bytes in the seconds of the largest copy: a curve that falls still has a bandwidth."""
_TOLERANCE = 1e-9
VERSION = 4
"""Version of how links are measured and fitted; files of other versions are measured anew."""


def measure_link(
    where: torch.device,
    directory: str | Path | None = None,
    throttle_bytes_per_s: float | None = None,
    sizes: tuple[int, ...] = (),
    ranks: int = 1,
    least: Least = int,
    beside: Callable[[], None] | None = None,
) -> Link:
    """The link of the device ``where``: on the CPU process memory to a spill file in ``directory`` and back, on others
    device memory to pinned host memory and back.

    The host tier is written once before, as the runtime does. ``sizes`` are bytes, ascending. The largest sizes are
    left out in these cases: one copy would take more than a quarter of a second under the throttle; the test's two
    places would take more than half of the free disk (on CUDA a quarter of the host's or the device's free memory); the
    first write of a smaller size took seconds; or the host has no memory for it. What the driver refuses to pin is
    measured as pageable memory, as the runtime then uses it.

    Several ``ranks`` of one host measure it together: each calls this function, and every copy begins on all of them at
    once. ``least`` returns the least of every rank's number, once all have called it. ``beside`` begins what runs
    beside each copy on all ranks: an all-reduce, because gradients are reduced while values are copied back.

    Raises ``SpillError`` if the directory cannot be used, has no room, or is too slow for the smallest size; on CUDA,
    if the host has not even that much memory.
    """
    device = open_device(where, directory, throttle_bytes_per_s)
    try:
        sizes = sizes or (SIZES_BYTES if where.type == "cpu" else DEVICE_SIZES_BYTES)
        sizes = tuple(x for x in sizes if not throttle_bytes_per_s or x <= throttle_bytes_per_s / 4) or sizes[:1]
        if where.type == "cpu":
            sizes = _written_once(device, _that_fit(sizes, choose_spill_dir(directory)))
        else:
            sizes = tuple(size for size in sizes if 8 * size <= _room_bytes(device)) or sizes[:1]
            sizes = _pinned_once(device, sizes)
        sizes = sizes[: least(len(sizes))]

        def begin() -> None:
            device.synchronize()
            least(0)
            if beside is not None:
                beside()

        out = _curve(copy_out, device, device.outward, sizes, begin)
        back = _curve(copy_in, device, device.inward, sizes, begin)
        return Link(
            name=device.host_tier,
            outward=fit_line(out),
            inward=fit_line(back),
            duplex=_duplex(device, sizes[-1], out[-1][1], back[-1][1], begin),
            interference_out=_interference(copy_out, device, sizes[-1], begin),
            interference_in=_interference(copy_in, device, sizes[-1], begin),
            throttle_bytes_per_s=throttle_bytes_per_s,
            ranks=ranks,
            **_pageable(device, sizes, begin),
        )
    finally:
        device.close()


def _pageable(device: ComputeDevice, sizes: tuple[int, ...], begin: Begin) -> dict[str, LinkDirection]:
    """The two directions of pageable memory; none on the CPU, whose host tier is a file."""
    if device.kind == "cpu":
        return {}
    sizes = tuple(size for size in sizes if size <= LARGEST_PAGEABLE_BYTES) or sizes[:1]
    out, back = pageable_curves(device, sizes, begin)
    return {"pageable_out": fit_line(out), "pageable_in": fit_line(back)}


def _that_fit(sizes: tuple[int, ...], directory: Path) -> tuple[int, ...]:
    free_bytes = shutil.disk_usage(directory).free
    fitting = tuple(size for size in sizes if 4 * size <= free_bytes)
    if not fitting:
        raise SpillError(
            f"link test: expected {format_bytes(4 * sizes[0])} free in {directory}, found {format_bytes(free_bytes)}; "
            "free space, or name another spill directory"
        )
    return fitting


def _room_bytes(device: ComputeDevice) -> int:
    """Bytes that are free on both device and host; the CPU device's host tier is a file."""
    return min(available_bytes(), memory_left(device.where))


def _written_once(device: ComputeDevice, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes for whose two places there is room and that are fast enough, which have then been written once."""
    written: list[int] = []
    for size in sizes:
        start_s = time.perf_counter()
        try:
            device.reserve_host(2 * size)
        except OSError as error:
            if written:
                break
            raise SpillError(
                f"link test: expected room for {format_bytes(2 * size)} to copy to, found none "
                f"({error.strerror}); free space, or name another spill directory"
            ) from None
        took_s = time.perf_counter() - start_s
        if took_s > _LONGEST_FIRST_WRITE_S and not written:
            raise SpillError(
                f"link test: expected a disk that takes {format_bytes(2 * size)} within {_LONGEST_FIRST_WRITE_S:g} s, "
                f"found one that took {format_seconds(took_s)}; name a spill directory on a faster disk"
            )
        written.append(size)
        if took_s > _LONGEST_FIRST_WRITE_S:
            break
    return tuple(written)


def _pinned_once(device: ComputeDevice, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes for whose two places memory can be pinned, which then is."""
    for count in range(len(sizes), 0, -1):
        try:
            device.reserve_host(2 * sizes[count - 1])
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return sizes[:count]
    raise SpillError(
        f"link test: expected {format_bytes(2 * sizes[0])} of host memory that can be pinned, found none ({reason}); "
        "free host memory, or raise the container's limit of it"
    )


CopyCall = Callable[[ComputeDevice, torch.UntypedStorage, int], Copy]


def _buffer(device: ComputeDevice, size_bytes: int) -> torch.UntypedStorage:
    storage = device.allocate(size_bytes)
    torch.empty(0, dtype=torch.uint8, device=device.where).set_(storage).fill_(1)  # touch the pages
    return storage


def _curve(copy: CopyCall, device: ComputeDevice, stream: Stream, sizes: tuple[int, ...], begin: Begin) -> Curve:
    """Seconds of copies on the stream. An accelerator's clock measures them, for queueing a copy may take as long, and
    counts as the launching thread's work.
    """
    clock = clock_of(device.where)

    def seconds(storage: torch.UntypedStorage) -> float:
        begin()
        before = clock.begin()
        queued = copy(device, storage, 0)
        if isinstance(stream, QueueStream):
            after = clock.mark(stream.stream)
            _checked(device, queued)
        else:
            _checked(device, queued)
            after = clock.mark()
        return clock.seconds(before, after)

    buffers = ((size_bytes, _buffer(device, size_bytes)) for size_bytes in sizes)
    return [(size_bytes, median(seconds(buffer) for _ in range(_REPEATS))) for size_bytes, buffer in buffers]


def pageable_curves(device: ComputeDevice, sizes: tuple[int, ...], begin: Begin) -> tuple[Curve, Curve]:
    """Seconds of copies to ordinary host memory and back, which the driver stages in its own pinned memory."""

    def copied(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        device.synchronize()

    out: Curve = []
    back: Curve = []
    for size_bytes in sizes:
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device.where)
        on_host = torch.ones(size_bytes, dtype=torch.uint8, device="cpu")
        out.append((size_bytes, _median_s(begin, partial(copied, on_host, on_device))))
        back.append((size_bytes, _median_s(begin, partial(copied, on_device, on_host))))
    return out, back


def _median_s(begin: Begin, run: Callable[[], object]) -> float:
    """Median seconds of several runs, each after ``begin``; ``run`` waits for its own end."""
    times_s = []
    for _ in range(_REPEATS):
        begin()
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def _checked(device: ComputeDevice, *copies: Copy) -> None:
    device.synchronize()
    for copy in copies:
        copy.wait()
        if copy.error is not None:
            raise SpillError(
                f"link test: expected copies to the host and back to work, found one that failed "
                f"({copy.error.strerror}); free space, or name another spill directory"
            )


def _duplex(device: ComputeDevice, size_bytes: int, out_s: float, in_s: float, begin: Begin) -> float:
    """Share of its rate that a direction keeps while both run."""
    outgoing, incoming = _buffer(device, size_bytes), _buffer(device, size_bytes)
    both_s = _median_s(
        begin, lambda: _checked(device, copy_out(device, outgoing, 0), copy_in(device, incoming, size_bytes))
    )
    # The shorter copy ends first, the longer runs its rest alone: total = long + short * (1 / share - 1).
    long_s, short_s = max(out_s, in_s), min(out_s, in_s)
    slowed = 1 + (both_s - long_s) / short_s
    return float(min(1.0, max(0.3, 1 / slowed))) if slowed > 0 else 1.0


def _interference(copy: CopyCall, device: ComputeDevice, size_bytes: int, begin: Begin) -> float:
    """How much longer ops take beside copies, minus 1.

    Half of a step's ops are bound by memory (norms, activations). The others are bound by arithmetic and slow down
    less. The mean of the two is used.
    """
    storage = _buffer(device, size_bytes)
    slowdowns = []
    for op in _probes(device):
        op()
        alone_s, beside_s = [], []
        for _ in range(_REPEATS):
            begin()
            alone_s.append(_per_call_s(device, op, lambda: None))
            begin()
            pending = [copy(device, storage, 0)]

            def keep_busy(pending: list[Copy] = pending) -> None:
                if pending[-1].done():
                    pending.append(copy(device, storage, 0))

            beside_s.append(_per_call_s(device, op, keep_busy))
            pending[-1].wait()
        slowdowns.append(max(0.0, median(beside_s) / median(alone_s) - 1))
    return float(np.mean(slowdowns))


def _probes(device: ComputeDevice) -> list[Callable[[], object]]:
    """One op bound by arithmetic, one by memory; each takes about a millisecond or less, and no fresh memory."""
    side, length = CPU_PROBE if device.kind == "cpu" else DEVICE_PROBE
    length = min(length, max(1, _room_bytes(device) // 32))  # of four bytes each, and as many again for the result
    left, right, product = torch.rand(3, side, side, device=device.where)
    field, positive = torch.rand(2, length, device=device.where)
    return [lambda: torch.mm(left, right, out=product), lambda: torch.clamp(field, 0, out=positive)]


def _per_call_s(device: ComputeDevice, op: Callable[[], object], between: Callable[[], object]) -> float:
    device.synchronize()
    start_s = time.perf_counter()
    calls = 0
    while time.perf_counter() - start_s < _PROBED_S:
        op()
        between()
        ended = device.compute.record()
        while not ended.done():
            pass
        calls += 1
    return (time.perf_counter() - start_s) / calls


def fit_line(curve: Curve) -> LinkDirection:
    """The line for a curve of (bytes, seconds), from small to large; exact if the curve is a line."""
    largest_bytes, longest_s = curve[-1]
    latency, slope = 0.0, 1.0
    if len(curve) > 1:
        sizes = np.array([size for size, _ in curve]) / largest_bytes
        seconds = np.array([second for _, second in curve]) / longest_s
        weights = np.minimum(1.0, sizes * largest_bytes / SMALL_BYTES)
        large = max((index for index, (size, _) in enumerate(curve) if size <= LARGE_BYTES), default=len(curve) - 1)
        latency, slope = _least_error(sizes, seconds, weights, large)
    return LinkDirection(
        latency_s=latency * longest_s,
        bandwidth_bytes_per_s=largest_bytes / (slope * longest_s),
        curve=tuple(curve),
    )


def _least_error(sizes: Floats, seconds: Floats, weights: Floats, large: int) -> tuple[float, float]:
    """Latency and slope with the least ``error``, by trying every corner of the region that the rows allow.

    ``weight * |line / seconds - 1| <= error`` at each size, the line no lower than its least shares, the latency not
    below 0: a linear program in three unknowns, whose optimum is where three rows meet.
    """
    line = np.stack([1 / seconds, sizes / seconds], axis=1)
    slack = 1 / weights
    rows = np.vstack(
        [
            np.column_stack([-line, slack]),
            np.column_stack([line, slack]),
            [[*line[large], 0.0], [*line[-1], 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        ]
    )
    least = np.array(
        [-1.0] * len(sizes) + [1.0] * len(sizes) + [LEAST_SHARE_LARGE, LEAST_SHARE_LARGEST, 0.0, _SLOPE_FLOOR]
    )
    triples = np.array(list(combinations(range(len(rows)), 3)))
    meet = np.abs(np.linalg.det(rows[triples])) > _TOLERANCE
    corners = np.linalg.solve(rows[triples[meet]], least[triples[meet], None])[..., 0]
    allowed = corners[(corners @ rows.T >= least - _TOLERANCE * np.abs(rows).max(axis=1)).all(axis=1)]
    latency, slope, _ = allowed[allowed[:, 2].argmin()]
    return float(latency) if latency > _TOLERANCE else 0.0, max(_SLOPE_FLOOR, float(slope))  # by the tolerance less


class CachedLinks(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    links: dict[str, Link]


def cache_path() -> Path:
    return cache_folder() / "links.json"


def link_key(where: torch.device, directory: str | Path | None, throttle_bytes_per_s: float | None) -> str:
    """What the link depends on: device, disk, throttle and torch. Raises ``SpillError`` as the spill file would."""
    if where.type != "cpu":
        parts = [backend_of(where).name(), "pinned"]
    else:
        folder = choose_spill_dir(directory)
        device = folder.stat().st_dev
        disk = f"{file_system_type(folder)} {os.major(device)}:{os.minor(device)}"
        parts = [platform.processor() or platform.machine(), platform.node(), disk]
    return ", ".join([*parts, f"throttle {throttle_bytes_per_s or 'none'}", f"torch {torch.__version__}"])


def cached_link(
    where: torch.device,
    directory: str | Path | None = None,
    throttle_bytes_per_s: float | None = None,
    *,
    refresh: bool = False,
) -> tuple[Link, bool]:
    """The link, and whether it comes from the cache. If it is not there, or on ``refresh``, it is measured and stored.

    Raises what :func:`measure_link` raises.
    """
    key = link_key(where, directory, throttle_bytes_per_s)
    known = _load().get(key)
    if known is not None and not refresh:
        return known, True
    link = measure_link(where, directory, throttle_bytes_per_s, CURVE_SIZES_BYTES)
    if link.name == "pageable":  # pinning may be allowed next time
        return link, False
    kept = encode_readable(CachedLinks(version=VERSION, links={**_load(), key: link}))
    warn_once(not_kept(cache_folder(), write_cache(cache_path(), kept)))
    return link, False


def known_link(
    where: torch.device, directory: str | Path | None = None, throttle_bytes_per_s: float | None = None
) -> Link | None:
    """The link, if it has been measured and stored; raises what :func:`link_key` raises."""
    return _load().get(link_key(where, directory, throttle_bytes_per_s))


def _load() -> dict[str, Link]:
    found = read_cache(cache_path(), CachedLinks)
    return found.links if found is not None and found.version == VERSION else {}
