"""The link: seconds per copy at several sizes, both directions, together, and what compute loses beside them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from poochplan.errors import SpillError
from poochplan.formats.profile import Link, LinkDirection
from poochplan.profiler.fake.memory_left import memory_left
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.spill import choose_spill_dir
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from poochplan.tensors.host_memory import available_bytes
from poochplan.units import format_bytes, format_seconds

from .curve import Curve, fit_line

SIZES_BYTES = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
CUDA_SIZES_BYTES = (*SIZES_BYTES, 256 << 20)
CURVE_SIZES_BYTES = tuple(4**power << 16 for power in range(8))
"""64 KiB to 1 GiB, for a full curve."""
LARGEST_PAGEABLE_BYTES = 256 << 20
"""Copies of pageable memory are measured up to here: they are there to compare, the runtime's are pinned."""
CPU_PROBE, CUDA_PROBE = (512, 4 << 20), (4096, 64 << 20)
"""What is computed beside copies: the side of two square matrices, and how many numbers go through a ReLU."""
_REPEATS = 5
_LONGEST_FIRST_WRITE_S = 5.0


def measure_link(
    where: torch.device,
    directory: str | Path | None = None,
    throttle_bytes_per_s: float | None = None,
    sizes: tuple[int, ...] = (),
) -> Link:
    """The link of the device ``where``: on the CPU process memory to a spill file in ``directory`` and back, on CUDA
    device memory to pinned host memory and back.

    The host tier is written once before, as the runtime does. ``sizes`` are bytes, ascending; the largest are left out
    where one copy would take more than a quarter of a second under the throttle, where the test's two places would take
    more than half of what is free on the disk (on CUDA a quarter of what the host or the device has free), and after
    one whose first write took seconds, or that cannot be pinned.

    Raises ``SpillError`` when the directory cannot be used, or has no room or is too slow for the smallest size; on
    CUDA, when not even so little memory can be pinned.
    """
    device = open_device(where, directory, throttle_bytes_per_s)
    try:
        sizes = sizes or (SIZES_BYTES if where.type == "cpu" else CUDA_SIZES_BYTES)
        sizes = tuple(x for x in sizes if not throttle_bytes_per_s or x <= throttle_bytes_per_s / 4) or sizes[:1]
        if where.type == "cpu":
            sizes = _that_fit(sizes, choose_spill_dir(directory))
        else:
            sizes = tuple(size for size in sizes if 8 * size <= _room_bytes(device)) or sizes[:1]
        sizes = _written_once(device, sizes)
        out = _curve(copy_out, device, sizes)
        back = _curve(copy_in, device, sizes)
        return Link(
            name="spill" if where.type == "cpu" else "pinned",
            outward=fit_line(out),
            inward=fit_line(back),
            duplex=_duplex(device, sizes[-1], out[-1][1], back[-1][1]),
            interference_out=_interference(copy_out, device, sizes[-1]),
            interference_in=_interference(copy_in, device, sizes[-1]),
            throttle_bytes_per_s=throttle_bytes_per_s,
            **_pageable(device, sizes),
        )
    finally:
        device.close()


def _pageable(device: Device, sizes: tuple[int, ...]) -> dict[str, LinkDirection]:
    """The two directions of pageable memory; none on the CPU, whose host tier is a file."""
    if device.kind != "cuda":
        return {}
    out, back = pageable_curves(device, tuple(size for size in sizes if size <= LARGEST_PAGEABLE_BYTES) or sizes[:1])
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


def _room_bytes(device: Device) -> int:
    """What the device and the host both have free; the CPU device's host tier is a file."""
    host_bytes = available_bytes()
    return host_bytes if device.kind == "cpu" else min(host_bytes, memory_left(device.where))


def _written_once(device: Device, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes for whose two places there is room and patience, which have then been written once."""
    if device.kind != "cpu":
        return _pinned_once(device, sizes)
    written: list[int] = []
    for size in sizes:
        start_s = time.perf_counter()
        try:
            device.reserve_host(2 * size)
        except OSError as error:
            if written:
                break
            raise SpillError(
                f"link test: expected room for {format_bytes(2 * size)} in the host tier, found none "
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


def _pinned_once(device: Device, sizes: tuple[int, ...]) -> tuple[int, ...]:
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


CopyCall = Callable[[Device, torch.UntypedStorage, int], Copy]


def _buffer(device: Device, size_bytes: int) -> torch.UntypedStorage:
    storage = device.allocate(size_bytes)
    torch.empty(0, dtype=torch.uint8, device=device.where).set_(storage).fill_(1)  # touch the pages
    return storage


def _curve(copy: CopyCall, device: Device, sizes: tuple[int, ...]) -> Curve:
    curve = []
    for size_bytes in sizes:
        storage = _buffer(device, size_bytes)

        def one(storage: torch.UntypedStorage = storage) -> None:
            _checked(device, copy(device, storage, 0))

        curve.append((size_bytes, _median_s(device, one)))
    return curve


def pageable_curves(device: Device, sizes: tuple[int, ...]) -> tuple[Curve, Curve]:
    """Seconds of copies to ordinary host memory and back, which the driver stages in pinned memory of its own."""
    out: Curve = []
    back: Curve = []
    for size_bytes in sizes:
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device.where)
        on_host = torch.ones(size_bytes, dtype=torch.uint8, device="cpu")
        for curve, to, source in ((out, on_host, on_device), (back, on_device, on_host)):

            def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                to.copy_(source)
                device.synchronize()

            curve.append((size_bytes, _median_s(device, copy)))
    return out, back


def _median_s(device: Device, run: Callable[[], object]) -> float:
    """Of several runs, each begun when the device has nothing left to do; ``run`` waits for its own end."""
    times_s = []
    for _ in range(_REPEATS):
        device.synchronize()
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def _checked(device: Device, *copies: Copy) -> None:
    device.synchronize()
    for copy in copies:
        copy.wait()
        if copy.error is not None:
            raise SpillError(
                f"link test: expected copies to the host tier and back to work, found one that failed "
                f"({copy.error.strerror}); free space, or name another spill directory"
            )


def _duplex(device: Device, size_bytes: int, out_s: float, in_s: float) -> float:
    """Share of its rate that a direction keeps while both run."""
    outgoing, incoming = _buffer(device, size_bytes), _buffer(device, size_bytes)
    both_s = _median_s(
        device, lambda: _checked(device, copy_out(device, outgoing, 0), copy_in(device, incoming, size_bytes))
    )
    # The shorter copy ends first, the longer runs its rest alone: total = long + short * (1 / share - 1).
    long_s, short_s = max(out_s, in_s), min(out_s, in_s)
    slowed = 1 + (both_s - long_s) / short_s
    return float(min(1.0, max(0.3, 1 / slowed))) if slowed > 0 else 1.0


def _interference(copy: CopyCall, device: Device, size_bytes: int) -> float:
    """How much longer ops take beside copies, less 1.

    Half of a step's ops are bound by memory (norms, activations), the others by arithmetic and suffer less: the mean of
    the two is taken.
    """
    storage = _buffer(device, size_bytes)
    slowdowns = []
    for op in _probes(device):
        op()
        alone_s, beside_s = [], []
        for _ in range(3):
            alone_s.append(_per_call_s(device, op, lambda: None))
            pending = [copy(device, storage, 0)]

            def keep_busy(pending: list[Copy] = pending) -> None:
                if pending[-1].done():
                    pending.append(copy(device, storage, 0))

            beside_s.append(_per_call_s(device, op, keep_busy))
            pending[-1].wait()
        slowdowns.append(max(0.0, median(beside_s) / median(alone_s) - 1))
    return float(np.mean(slowdowns))


def _probes(device: Device) -> list[Callable[[], object]]:
    """One op bound by arithmetic, one by memory; each takes about a millisecond or less."""
    side, length = CPU_PROBE if device.kind == "cpu" else CUDA_PROBE
    length = min(length, max(1, _room_bytes(device) // 32))  # of four bytes each, and as many again for the result
    left, right = torch.rand(2, side, side, device=device.where)
    field = torch.rand(length, device=device.where)
    return [lambda: left @ right, lambda: torch.relu(field)]


def _per_call_s(
    device: Device, op: Callable[[], object], between: Callable[[], object], duration_s: float = 0.02
) -> float:
    device.synchronize()
    start_s = time.perf_counter()
    calls = 0
    while time.perf_counter() - start_s < duration_s:
        op()
        between()
        ended = device.compute.record()
        while not ended.done():
            pass
        calls += 1
    return (time.perf_counter() - start_s) / calls
