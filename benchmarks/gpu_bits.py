"""Seconds of narrowing masks to bits and of widening them on a GPU: by the kernels, by ops of torch, beside a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.facts import Row, table_head, table_row
from poochplan.runtime.replays.bits import narrow, on_device, widen
from poochplan.tensors.storages import on_whole
from poochplan.units import format_bytes, format_seconds

DTYPES = torch.bool, torch.bfloat16, torch.float32
ELEMENTS, TINY_ELEMENTS = 1 << 28, 1 << 12
RUNS = 20


def seconds(where: torch.device, run: Callable[..., object], *given: Any) -> float:
    """Of one run, where the host is ahead of the GPU."""
    run(*given)
    torch.cuda.synchronize(where)
    start_s = time.perf_counter()
    for _ in range(RUNS):
        run(*given)
    torch.cuda.synchronize(where)
    return (time.perf_counter() - start_s) / RUNS


def rows(where: torch.device, *, is_tiny: bool) -> Iterator[Row]:
    """One for each type of elements and each way: seconds, and the bytes of mask and bits, which each pass moves.

    A copy of the mask to another place shows how many bytes the GPU can read and write in a second.
    """
    for dtype in DTYPES:
        mask = (torch.rand(TINY_ELEMENTS if is_tiny else ELEMENTS, device=where) < 0.9).to(dtype)
        patterns, storage, other = on_device(mask.device, dtype, ()), mask.untyped_storage(), torch.empty_like(mask)
        copied_bytes_per_s = 2 * mask.nbytes / seconds(where, other.copy_, mask)
        for way, chosen in (("kernel", patterns), ("ops of torch", patterns._replace(kernels=None))):
            made = narrow(storage, dtype, chosen)
            if made is None or (way == "kernel" and chosen.kernels is None):
                continue
            bits = on_whole(made, torch.uint8)
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "way": way,
                "narrow_s": seconds(where, narrow, storage, dtype, chosen),
                "widen_s": seconds(where, widen, bits, len(mask), dtype, chosen),
                "bytes": mask.nbytes + bits.nbytes,
                "copied_bytes_per_s": copied_bytes_per_s,
            }


def table(found: list[Row]) -> Iterator[str]:
    """The rows for the suite's page."""
    yield table_head("mask", "by", "narrowing", "widening", "a copy")
    for row in found:
        both = row["narrow_s"], row["widen_s"]
        rates = [f"{format_seconds(one)}, {format_bytes(int(row['bytes'] / one))}/s" for one in both]
        copy = f"{format_bytes(int(row['copied_bytes_per_s']))}/s"
        yield table_row(row["dtype"], row["way"], *rates, copy)
