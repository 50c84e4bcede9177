"""How torch's CUDA allocator is set while a session runs, and what that means for the GPU's memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from poochplan.torch_private.cuda_internals import allocator_settings, set_allocator

from .cuda import hard_cap
from .device import ComputeDevice

EXPANDING = "the GPU's memory is taken in expandable segments within this session, so that less is reserved"
THEIRS = "the GPU's memory is taken as you have set it ({})"
FIXED = "segments do not expand, so that more may be reserved"
OURS = "expandable_segments:True"
UNKNOWN = "how much is reserved is not predicted"


class _Holders:
    """State: how many open sessions have taken over the setting of the first of them. The last to end undoes it."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()

    def is_set_by_user(self, found: Mapping[str, object]) -> bool:
        """Whether the setting is another than that of open sessions."""
        is_set = bool(found["PYTORCH_CUDA_ALLOC_CONF"] or found["expandable_segments"])
        return is_set and not (self._count and _is_ours(found))

    def join(self) -> None:
        with self._lock:
            if not self._count:
                set_allocator(OURS)
            self._count += 1

    def leave(self) -> None:
        """As if nothing had been set, unless the user has set something since."""
        with self._lock:
            self._count -= 1
            if not self._count and _is_ours(allocator_settings()):
                set_allocator("expandable_segments:False")
                set_allocator("")


def _is_ours(found: Mapping[str, object]) -> bool:
    return found["PYTORCH_CUDA_ALLOC_CONF"] == OURS


_HOLDERS = _Holders()


class Segments(NamedTuple):
    """How a session takes memory from the GPU."""

    expand: bool | None
    """Whether its segments expand; None if what is reserved follows other rules than those of the planner's model."""
    line: str
    """What that means, for the user."""


@contextlib.contextmanager
def settled(device: ComputeDevice, cap_bytes: int | None) -> Iterator[Segments]:
    """A block in which a session takes memory from the device, at most ``cap_bytes``; on the CPU nothing changes."""
    if device.kind != "cuda":
        yield Segments(None, "")
        return
    with expanding(device.where) as segments, contextlib.ExitStack() as stack:
        if cap_bytes is not None:
            stack.enter_context(hard_cap(device.where, cap_bytes))
        yield segments


def in_session() -> Segments:
    """How a session would take memory, or takes it, on a platform that has expandable segments."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return Segments(None, f"{THEIRS.format(f'backend:{backend}')}; {UNKNOWN}")
    found = allocator_settings()
    if not {"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments", "max_split_size"} <= found.keys():
        return Segments(None, "")  # an older torch does not tell them
    return _as_set(found) if _HOLDERS.is_set_by_user(found) else Segments(True, EXPANDING)


@contextlib.contextmanager
def expanding(where: torch.device) -> Iterator[Segments]:
    """A block in which the allocator's segments expand, if it is torch's own and the user has not set it. Blocks of
    several sessions may overlap.
    """
    segments = in_session()
    if segments.line != EXPANDING:
        yield segments
        return
    _HOLDERS.join()
    try:
        is_on = bool(allocator_settings()["expandable_segments"])  # not every platform has them
        yield Segments(is_on, EXPANDING if is_on else FIXED)
    finally:
        with torch.cuda.device(where):
            torch.cuda.empty_cache()  # what has been cached in expandable segments would serve no other
        _HOLDERS.leave()


def _as_set(found: dict[str, object]) -> Segments:
    rounding = found.get("roundup_power2_divisions")
    is_rounded = isinstance(rounding, dict) and any(rounding.values())
    line = THEIRS.format(found["PYTORCH_CUDA_ALLOC_CONF"] or OURS)
    if found["max_split_size"] != -1 or found.get("garbage_collection_threshold") or is_rounded:
        return Segments(None, f"{line}; {UNKNOWN}")
    expand = bool(found["expandable_segments"])
    return Segments(expand, line if expand else f"{line}; {FIXED}")
