"""How seconds are measured, for each kind of device.

On the CPU an op has ended when its call returns. On CUDA the call only queues it. There, events before and after the op
measure its time on the device. They are read once for the whole step, so that no op is followed by a wait.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from poochplan.torch_private.cuda_internals import clear_cublas_workspaces, gpu_sleep

_HALF_A_HEAD_START_CYCLES = 1_000_000
"""About half a millisecond of a GPU."""


class Clock:
    """Seconds between two marks, known after :meth:`synchronize`: of the calling thread, on which the CPU's ops run."""

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


class CudaClock(Clock):
    """Events on the calling thread's current stream.

    An idle device would reach the first event before the op is queued, and the time of queueing would count as the
    op's. So the device gets a head start, which keeps it busy for a millisecond, and the ops queue up behind that. It
    gets another one once it is behind the middle of the last: so half a millisecond is always left to queue an op in.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._middle: torch.cuda.Event | None = None

    def begin(self) -> torch.cuda.Event:
        if self._middle is None or self._middle.query():
            gpu_sleep(_HALF_A_HEAD_START_CYCLES, self._where)
            self._middle = self.mark()
            gpu_sleep(_HALF_A_HEAD_START_CYCLES, self._where)
        return self.mark()

    def end(self) -> torch.cuda.Event:
        return self.mark()

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._where))
        return event

    def processor_s(self) -> float:
        return time.process_time()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._where)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return max(0.0, float(begin.elapsed_time(end)) / 1e3)  # on two streams the end may come first


def current(where: torch.device) -> AbstractContextManager[object]:
    """Makes that device the one for events and peaks that name no other."""
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


def clock_of(where: torch.device) -> Clock:
    return CudaClock(where) if where.type == "cuda" else Clock()


def library_bytes(where: torch.device) -> int:
    """Bytes that cuBLAS holds between ops. This call frees them; the next op takes them again. 0 on the CPU."""
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    before_bytes = torch.cuda.memory_allocated(where)
    clear_cublas_workspaces()
    return before_bytes - torch.cuda.memory_allocated(where)
