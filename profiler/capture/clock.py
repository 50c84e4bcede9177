"""How seconds are measured, for each kind of device.

On the CPU an op has ended when its call returns. Other devices only queue it then. There, events before and after the
op measure its time on the device. They are read once for the whole step, so that no op is followed by a wait.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from poochplan.runtime.devices.backend import backend_of
from poochplan.torch_private.cuda_internals import clear_cublas_workspaces
from poochplan.torch_private.tensor_internals import unseen_by_modes

_HALF_A_HEAD_START_CYCLES = 1_000_000
"""About half a millisecond of a GPU."""


class Clock:
    """Seconds between two marks, known after :meth:`synchronize`: of the calling thread, on which the CPU's ops run."""

    is_ahead = False
    """Whether the calling thread runs ahead of the device's work."""

    def begin(self) -> Any:
        return self.mark()

    def end(self) -> Any:
        return self.mark()

    def mark(self, stream: Any = None) -> Any:
        """A mark now; on a device's ``stream``, by default the current one, the place after all queued work."""
        return time.perf_counter()

    def processor_s(self) -> float:
        """The processor's seconds of the thread that launches; with CUDA's backward thread the process's."""
        return time.thread_time()

    def synchronize(self) -> None:
        """Blocks the calling thread until all marks have been passed."""

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class DeviceClock(Clock):
    """Events on the calling thread's current stream.

    An idle device would reach the first event before the op is queued, and the time of queueing would count as the
    op's. So a GPU gets a head start, which keeps it busy for a millisecond, and the ops queue up behind that. It
    gets another one once it is behind the middle of the last: so half a millisecond is always left to queue an op in.
    Other accelerators get none, because torch has no such work for them.
    """

    is_ahead = True

    def __init__(self, where: torch.device) -> None:
        self._backend = backend_of(where)
        self._middle: torch.Event | None = None

    def begin(self) -> torch.Event:
        if self._middle is None or self._middle.query():
            self._backend.keep_busy(_HALF_A_HEAD_START_CYCLES)
            self._middle = self.mark()
            self._backend.keep_busy(_HALF_A_HEAD_START_CYCLES)
        return self.mark()

    def end(self) -> torch.Event:
        return self.mark()

    def mark(self, stream: torch.Stream | None = None) -> torch.Event:
        event = self._backend.new_event(timed=True)
        event.record(stream or self._backend.current_stream())
        return event

    def processor_s(self) -> float:
        return time.process_time()

    def synchronize(self) -> None:
        self._backend.synchronize()

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        return max(0.0, float(begin.elapsed_time(end)) / 1e3)  # on two streams the end may come first


def current(where: torch.device) -> AbstractContextManager[object]:
    """Makes that device the one for events and peaks that name no other."""
    return nullcontext() if where.type == "cpu" else backend_of(where).here()


def clock_of(where: torch.device) -> Clock:
    return Clock() if where.type == "cpu" else DeviceClock(where)


def library_bytes(where: torch.device) -> int:
    """Bytes that cuBLAS holds between ops, and takes in replays. This call frees them; the next op takes them again.
    0 on other devices.
    """
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    held_bytes = _freed_workspaces(where)
    return held_bytes + (_light_bytes(where) if held_bytes else 0)


def _freed_workspaces(where: torch.device) -> int:
    before_bytes = torch.cuda.memory_allocated(where)
    clear_cublas_workspaces()
    return before_bytes - torch.cuda.memory_allocated(where)


@functools.cache
def _light_bytes(where: torch.device) -> int:
    """Bytes of cuBLASLt's own workspace of a thread, before torch 2.12. Autograd's thread may only take it in a replay.
    Later versions of torch have one workspace for both libraries, and this is 0.
    """
    with unseen_by_modes(), torch.no_grad():
        rows, bias = torch.ones(16, 16, device=where), torch.ones(16, device=where)
        torch.addmm(bias, rows, rows)
        both_bytes = _freed_workspaces(where)
        torch.mm(rows, rows)
        return both_bytes - _freed_workspaces(where)
