"""Work that is none of the loop's, on a thread of its own: no hook and no mode of the loop's thread sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def aside(work: Callable[[], T]) -> T:
    """What it gives; the calling thread waits for it, and what it raises is raised here.

    Random numbers that it draws are none of the loop's: torch's generators are then as they were.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=gpus),
        ThreadPoolExecutor(1, thread_name_prefix="poochplan-aside") as pool,
    ):
        return pool.submit(work).result()
