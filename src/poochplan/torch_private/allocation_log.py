"""Torch's log of a thread's allocations on the CPU, for profilers. It gives way where a profiler of the user begins."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler, profiler_legacy

from .tensor_internals import OUTSIDE, graph_task

RecordedEvent = tuple[str, str, int]
"""Kind, name and bytes. A negative ``memory_alloc`` is freed."""


class AllocationLog:
    """State: where it began, and whether it is open: the only log or profiler of its thread."""

    def __init__(self) -> None:
        self.is_open, self._began_in = True, graph_task()

    @property
    def may_end(self) -> bool:
        """Not in a backward pass in which it did not begin. When that ends, autograd restores its thread's state, with
        the log. Had it been ended before, torch's callbacks would stay, and break the next profiler.
        """
        return graph_task() in (self._began_in, OUTSIDE)

    @property
    def ends_behind_backward(self) -> bool:
        """Whether it has to be ended behind the backward pass that runs."""
        return not self.may_end and self._began_in == OUTSIDE

    def events(self) -> list[RecordedEvent] | None:
        """Ends the log: its events, in order. None if it has given way, or is of another thread.

        If it began within a backward that raised, it is empty: autograd has removed it.
        """
        if _here.log is not self:
            return None
        _here.log, self.is_open = None, False
        try:
            logged = _profiling._disable_profiler_legacy()
        except RuntimeError:
            return []
        return [(str(event.kind()), event.name(), event.cpu_memory_usage()) for events in logged for event in events]


def log_allocations() -> AllocationLog | None:
    """Starts to log this thread's allocations. None if a profiler, the only one, is active.

    It uses the older profiler, which starts in microseconds and prints nothing on stderr.
    """
    _give_way()
    if _profiling._profiler_enabled():
        return None
    _let_profilers_begin()
    experimental = torch._C._profiler._ExperimentalConfig()
    state = _profiling.ProfilerState.CPU
    _profiling._enable_profiler_legacy(_profiling.ProfilerConfig(state, False, True, False, False, False, experimental))
    _here.log = AllocationLog()
    return _here.log


allocation_mark: Callable[[str], AbstractContextManager[object]] = torch._C._profiler._RecordFunctionFast
"""A block with a name in the log, which no dispatch mode sees; without effect if there is no log."""


class _Here(threading.local):
    log: AllocationLog | None = None
    """The open one of this thread."""


def _give_way() -> None:
    if _here.log is not None and _here.log.may_end:
        _here.log.events()


@functools.cache
def _let_profilers_begin() -> None:
    """From here on a profiler that begins ends the log of its thread: torch has room for one, and would raise."""

    def giving_way(begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def begins(*args: Any, **kwargs: Any) -> Any:
            _give_way()
            return begin(*args, **kwargs)

        return begins

    for module, name in _BEGINNINGS:
        setattr(module, name, giving_way(getattr(module, name)))


_profiling: Any = torch.autograd
_here = _Here()
_BEGINNINGS: tuple[tuple[Any, str], ...] = (
    (profiler, "_prepare_profiler"),
    (profiler, "_enable_profiler"),
    (profiler_legacy, "_enable_profiler_legacy"),
)
