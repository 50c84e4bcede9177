"""The link: seconds per copy at several sizes, both directions, together, and what compute loses beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ..errors import SpillError
from ..runtime.cpu import CpuDevice, SpillCopy
from ..units import format_bytes
from .schema import Link, LinkDirection

SIZES_BYTES = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
_REPEATS = 5


def measure_spill_link(directory: str | Path | None = None, throttle_bytes_per_s: float | None = None) -> Link:
    """The link of the CPU device: process memory to a spill file in ``directory`` and back.

    The file is written once before, as the runtime does. With a throttle the largest size is cut so that one copy takes
    at most a quarter of a second.

    Raises ``SpillError`` when the directory cannot be used or the disk is full.
    """
    device = CpuDevice(directory, throttle_bytes_per_s=throttle_bytes_per_s)
    try:
        sizes = [size for size in SIZES_BYTES if not throttle_bytes_per_s or size <= throttle_bytes_per_s / 4]
        sizes = sizes or [SIZES_BYTES[0]]
        try:
            device.write_ahead(2 * sizes[-1])
        except OSError as error:
            raise SpillError(
                f"spill directory {device.file.directory}: {format_bytes(2 * sizes[-1])} for the link test could not "
                f"be written ({error.strerror}); free space or name another"
            ) from None
        out = _curve(device.copy_out, device, sizes)
        back = _curve(device.copy_in, device, sizes)
        return Link(
            name="spill",
            outward=_fit(out),
            inward=_fit(back),
            duplex=_duplex(device, sizes[-1], out[-1][1], back[-1][1]),
            interference_out=_interference(device.copy_out, device, sizes[-1]),
            interference_in=_interference(device.copy_in, device, sizes[-1]),
            throttle_bytes_per_s=throttle_bytes_per_s,
        )
    finally:
        device.close()


CopyCall = Callable[[torch.UntypedStorage, int], SpillCopy]


def _buffer(device: CpuDevice, size_bytes: int) -> torch.UntypedStorage:
    storage = device.allocate(size_bytes)
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(1)  # touch the pages
    return storage


def _curve(copy: CopyCall, device: CpuDevice, sizes: list[int]) -> list[tuple[int, float]]:
    curve = []
    for size_bytes in sizes:
        storage = _buffer(device, size_bytes)
        times_s = []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            _checked(copy(storage, 0))
            times_s.append(time.perf_counter() - start_s)
        curve.append((size_bytes, median(times_s)))
    return curve


def _checked(copy: SpillCopy) -> None:
    copy.wait()
    if copy.error is not None:
        raise SpillError(f"the link test failed: {copy.error.strerror}; check the spill directory")


def _fit(curve: list[tuple[int, float]]) -> LinkDirection:
    """Least squares of ``latency + bytes / bandwidth``, each point weighted by its own size of error (relative)."""
    sizes = np.array([size for size, _ in curve], dtype=float)
    seconds = np.array([second for _, second in curve])
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(rows, np.ones(len(curve)), rcond=None)
    if len(curve) == 1 or latency_s < 0 or per_byte_s <= 0:
        latency_s, per_byte_s = 0.0, float(seconds[-1] / sizes[-1])
    return LinkDirection(latency_s=float(latency_s), bandwidth_bytes_per_s=float(1 / per_byte_s), curve=tuple(curve))


def _duplex(device: CpuDevice, size_bytes: int, out_s: float, in_s: float) -> float:
    """Share of its rate that a direction keeps while both run."""
    outgoing, incoming = _buffer(device, size_bytes), _buffer(device, size_bytes)
    times_s = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        copies = device.copy_out(outgoing, 0), device.copy_in(incoming, size_bytes)
        for copy in copies:
            _checked(copy)
        times_s.append(time.perf_counter() - start_s)
    # The shorter copy ends first, the longer runs its rest alone: total = long + short * (1 / share - 1).
    long_s, short_s = max(out_s, in_s), min(out_s, in_s)
    slowed = 1 + (median(times_s) - long_s) / short_s
    return float(min(1.0, max(0.3, 1 / slowed))) if slowed > 0 else 1.0


def _interference(copy: CopyCall, device: CpuDevice, size_bytes: int) -> float:
    """How much longer a memory-bound op takes beside copies, less 1.

    Half of a step's ops are bound by memory (norms, activations), the others by arithmetic and suffer less: the mean of
    the two is taken.
    """
    storage = _buffer(device, size_bytes)
    left, right = torch.rand(512, 512), torch.rand(512, 512)
    field = torch.rand(4 << 20)
    ops: list[Callable[[], object]] = [lambda: left @ right, lambda: torch.relu(field)]
    slowdowns = []
    for op in ops:
        op()
        alone_s, beside_s = [], []
        for _ in range(3):
            alone_s.append(_per_call_s(op, lambda: False))
            pending = [copy(storage, 0)]

            def keep_busy(pending: list[SpillCopy] = pending) -> bool:
                if pending[-1].done():
                    pending.append(copy(storage, 0))
                return False

            beside_s.append(_per_call_s(op, keep_busy))
            pending[-1].wait()
        slowdowns.append(max(0.0, median(beside_s) / median(alone_s) - 1))
    return float(np.mean(slowdowns))


def _per_call_s(op: Callable[[], object], between: Callable[[], object], duration_s: float = 0.04) -> float:
    start_s = time.perf_counter()
    calls = 0
    while time.perf_counter() - start_s < duration_s:
        op()
        between()
        calls += 1
    return (time.perf_counter() - start_s) / calls
